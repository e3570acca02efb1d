"""tests.train.child in a process that is slow: the others may be done preparing before it looks at the run's folder, and wait for
the batch of its second step for longer than `processes.stall`."""

import pathlib
import sys
import time
from unittest import mock

from atlasjax.data.windows import Batch
from atlasjax.train import TrainConfig, loop, resume
from tests.train import child

_SECONDS = 5.0
_check = resume.check_resumable
_next_batch = loop._Run._next_batch


def check_late(config: TrainConfig) -> list[str]:
    deadline = time.monotonic() + _SECONDS
    while not (pathlib.Path(config.run_dir) / "checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return _check(config)


def read_late(run: loop._Run, step: int) -> Batch:
    if step == 2:
        time.sleep(3 * run.config.processes.stall)
    return _next_batch(run, step)


if __name__ == "__main__":
    with (
        mock.patch.object(resume, "check_resumable", check_late),
        mock.patch.object(loop._Run, "_next_batch", read_late),
    ):
        child.main(*sys.argv[1:])
