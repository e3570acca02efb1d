"""`python -m atlasjax.cli` is the command `atlasjax`."""

import sys

from atlasjax.cli import main

sys.exit(main())
