"""`atlasjax.mixers.gam` by its public name."""

import sys

from atlasjax.mixers import gam
from atlasjax.mixers.gam import *  # noqa: F403  # for editors and type checkers

sys.modules[__name__] = gam  # the same module, not a copy
