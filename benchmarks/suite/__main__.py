"""`python benchmarks/suite`: see `suite/command.py`."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: that is on the path, and not the one around it
    sys.path[0] = str(Path(__file__).parents[1])

from suite.command import main

if __name__ == "__main__":
    main()
