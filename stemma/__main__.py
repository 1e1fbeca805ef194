"""`python -m stemma`: the command line."""

from stemma.cli import main

if __name__ == "__main__":
    main()
