"""A training run in a process of its own, which may kill itself: python -m tests.train.child CONFIG KILL_AT."""

import json
import os
import signal
import sys

from atlasjax.config_json import from_dict
from atlasjax.train import TrainConfig, train


def main(config: str, kill_at: str) -> None:
    def on_step(step: int) -> None:
        if step == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    train(from_dict(TrainConfig, json.loads(config)), on_step=on_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
