"""A training run in a process of its own, which does not wait long for others: python -m tests.storage.child CONFIG KILL_AT."""

import sys

from atlasjax.storage import lease
from atlasjax.train.saving import checkpoint, saves
from tests.train import child

if __name__ == "__main__":
    lease.SECONDS = 2.0
    checkpoint.DEADLINE = checkpoint.LONGEST = 15
    saves.PAUSE = 0.1
    child.main(*sys.argv[1:])
