"""Exact resume: a run that is killed, wherever, and goes on gives bit for bit the losses of one that was not."""

import dataclasses
import signal

import pytest

from atlasjax.config_json import to_dict
from tests.train.tiny import child, config, finish, train_losses

STEPS = 9


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(uninterrupted, killed) run configs; the second was killed after steps 4 and 7, with checkpoints every 2 steps."""
    folder = tmp_path_factory.mktemp("resume")
    whole = config(folder, steps=STEPS, run_dir=str(folder / "whole"), eval_every=3, accumulation=2)
    killed = dataclasses.replace(whole, run_dir=str(folder / "killed"))
    uninterrupted = child("tests.train.child", to_dict(whole), "-1", wait=False)
    # After step 4 its checkpoint is being written in the background; after step 7 that of step 6 is complete.
    outputs = [child("tests.train.child", to_dict(killed), str(kill_at)) for kill_at in (4, 7, -1)]
    done = finish(uninterrupted)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [output.returncode for output in outputs] == [-signal.SIGKILL, -signal.SIGKILL, 0], outputs[-1].stderr[
        -2000:
    ]
    return whole, killed, outputs


def test_losses_are_bit_for_bit_those_of_an_uninterrupted_run(runs):
    whole, killed, _ = runs
    losses = train_losses(whole.run_dir)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert train_losses(killed.run_dir) == losses  # no step missing, none twice, all equal
    assert len({loss for _, loss in losses}) == STEPS


def test_it_says_where_it_resumes(runs):
    _, _, outputs = runs
    assert "Resuming from step 2" in outputs[1].stdout or "Resuming from step 4" in outputs[1].stdout
    assert "Resuming from step" in outputs[2].stdout
    assert "Resuming" not in outputs[0].stdout


def test_final_checkpoints_are_equal(runs):
    from atlasjax.train import Checkpoints

    sums = []
    for run in runs[:2]:
        with Checkpoints(run.run_dir + "/checkpoints") as checkpoints:
            assert checkpoints.steps()[-1] == STEPS
            loaded = checkpoints._checkpointer.load_checkpointables(STEPS, {"integrity": None, "position": None})
            del loaded["integrity"][".config"]  # they have different folders
            sums.append(loaded)
    assert sums[0] == sums[1]
