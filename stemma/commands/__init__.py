"""What the commands of the command line do; `app.py` declares them."""
