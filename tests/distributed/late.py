"""tests.train.child in a process that is slow: the others may be done preparing before it looks at the run's folder."""

import pathlib
import sys
import time
from unittest import mock

from atlasjax.train import TrainConfig, setup
from tests.train import child

_SECONDS = 5.0
_check = setup.check_resumable


def check_late(config: TrainConfig) -> list[str]:
    deadline = time.monotonic() + _SECONDS
    while not (pathlib.Path(config.run_dir) / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return _check(config)


if __name__ == "__main__":
    with mock.patch.object(setup, "check_resumable", check_late):
        child.main(*sys.argv[1:])
