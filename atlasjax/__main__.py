"""`python -m atlasjax` is the command `atlasjax`."""

import sys

from atlasjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
