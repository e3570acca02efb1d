"""A training run in a process of its own, with a short lease: python -m tests.storage.child CONFIG KILL_AT."""

import sys

from atlasjax.storage import lease
from tests.train import child

if __name__ == "__main__":
    lease.SECONDS = 2.0
    child.main(*sys.argv[1:])
