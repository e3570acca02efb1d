"""Saves a checkpoint although no file may grow past 8 KiB: python -m tests.train.failing_save FOLDER."""

import resource
import sys

from atlasjax.train import CheckpointError, Checkpoints
from tests.train.test_checkpoint import CONFIG, make_state


def main(folder: str) -> int:
    state = make_state(8)
    with Checkpoints(folder) as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            checkpoints.save(state, [None], CONFIG)
            checkpoints.wait()
        except CheckpointError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
