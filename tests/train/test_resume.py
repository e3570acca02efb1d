"""Exact resume: a run that is killed, wherever, and goes on gives bit for bit the losses of one that was not."""

import contextlib
import dataclasses
import io
import signal

import jax
import pytest

from atlasjax.config_json import to_dict
from atlasjax.train import train
from tests.train.tiny import child, config, train_losses

pytestmark = pytest.mark.usefixtures("compile_fast")

STEPS = 9


# After step 4 its checkpoint is being written in the background; after step 7 that of step 6 is complete.
@pytest.fixture(scope="module", params=[(4,), pytest.param((4, 7), marks=pytest.mark.slow)], ids=str)
def runs(tmp_path_factory, request):
    """(run that was not stopped, run that was killed, what that one printed). The other is killed in its own processes, and goes
    on to its end in this one. There is a checkpoint every 2 steps."""
    folder = tmp_path_factory.mktemp("resume")
    whole = config(folder, steps=STEPS, run_dir=str(folder / "whole"), eval_every=3, accumulation=2)
    killed = dataclasses.replace(whole, run_dir=str(folder / "killed"))
    train(whole)
    outputs = []
    for kill_at in request.param:
        done = child("tests.train.child", to_dict(killed), str(kill_at), devices=jax.device_count())
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        outputs.append(done.stdout)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(killed)
    return whole, killed, [*outputs, out.getvalue()]


def test_losses_are_bit_for_bit_those_of_an_uninterrupted_run(runs):
    whole, killed, _ = runs
    losses = train_losses(whole.run_dir)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert train_losses(killed.run_dir) == losses  # no step missing, none twice, all equal
    assert len({loss for _, loss in losses}) == STEPS


def test_it_says_where_it_resumes(runs):
    _, _, outputs = runs
    assert "Resuming" not in outputs[0]
    assert "Resuming from step 2" in outputs[1] or "Resuming from step 4" in outputs[1]
    assert all("Resuming from step" in output for output in outputs[1:])


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
