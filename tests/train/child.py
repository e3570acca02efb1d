"""A training run in a process of its own, which may signal itself: python -m tests.train.child CONFIG STEP [SIGNAL]."""

import json
import os
import signal
import sys

from atlasjax.config_json import from_dict
from atlasjax.train import Interrupted, TrainConfig, train


def main(config: str, step: str, number: str = str(int(signal.SIGKILL))) -> None:
    def on_step(done: int) -> None:
        if done == int(step):
            os.kill(os.getpid(), int(number))

    try:
        train(from_dict(TrainConfig, json.loads(config)), on_step=on_step)
    except Interrupted as error:
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
