"""Two processes train together as one does (gloo on the CPU), and one goes on from their checkpoint."""

import dataclasses
import re
import signal
import socket
import time

import numpy as np
import pytest

from atlasjax.cli import TRY_AGAIN
from atlasjax.config_json import to_dict
from atlasjax.distributed import MeshConfig, ProcessConfig
from atlasjax.train import train
from tests.train.tiny import TEXT, child, config, finish, train_losses

pytestmark = pytest.mark.usefixtures("compile_fast")


def coordinator() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


# The others train three more runs each.
@pytest.mark.parametrize(
    ("mesh", "words", "packing"),
    [
        (MeshConfig(1, 2), "fsdp 2 × tensor 1", "contiguous"),
        *(
            pytest.param(mesh, words, packing, marks=pytest.mark.slow)
            for mesh, words in (
                (MeshConfig(1, sequence=2), "fsdp 1 × sequence 2 × tensor 1"),
                (MeshConfig(1, 1, 2), "fsdp 1 × tensor 2"),
            )
            for packing in ("contiguous", "documents")
        ),
    ],
)
def test_two_processes(mesh, words, packing, tmp_path):
    """One of them is late, and the other says so. The last axes are over both processes, which read the same rows."""
    address = coordinator()
    changes = {"data_changes": {"packing": packing}, "steps": 6, "eval_batches": 2}
    alone = config(tmp_path, run_dir=str(tmp_path / "alone"), mesh=MeshConfig(1, 2), **changes)
    together = dataclasses.replace(alone, run_dir=str(tmp_path / "together"), mesh=mesh, steps=4)
    runs = []
    for index in range(2):
        run = dataclasses.replace(together, processes=ProcessConfig(True, address, 2, index, stall=1))
        module = "tests.distributed.late" if index else "tests.train.child"
        runs.append(child(module, to_dict(run), "-1", wait=False))
    train(alone)
    results = [finish(run) for run in runs]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr[-3000:]
    assert "step" in results[0].stdout
    assert f"2 processes on 1 host, 2 devices (cpu) in 1 slice; mesh data 1 × {words}" in results[0].stdout
    assert "step" not in results[1].stdout  # one of the processes speaks
    assert re.search(
        r"No progress for .*: process 1 \(.*\) has been reading its batch for .* s, at step 2\.", results[0].stdout
    )
    resumed = train(dataclasses.replace(alone, run_dir=together.run_dir))
    assert (resumed.resumed_from, resumed.step) == (4, 6)
    expected, found = train_losses(alone.run_dir), train_losses(together.run_dir)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    # The schedule of the shorter run differs from its third step on: compare the steps before.
    np.testing.assert_allclose([loss for _, loss in found[:3]], [loss for _, loss in expected[:3]], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other(victim, tmp_path):
    """By the command: it names the last checkpoint, says how to go on, and its exit code lets a restart policy start again.

    Without process 0, which has jax's coordination service, jax may abort the other one before our error is raised; the abort is
    explained then.
    """
    address = coordinator()
    (tmp_path / "text.txt").write_text(TEXT)
    options = [
        *("train", "--preset", "linear-attention-tiny", "--model.dim", "16", "--model.num-layers", "1", "--model.num-heads", "2"),
        *("--model.mlp-dim", "32", "--data.source", "text", "--data.paths", str(tmp_path / "text.txt"), "--mesh.data", "2"),
        *("--data.sequence-length", "16", "--data.batch-size", "8", "--eval-every", "0", "--checkpoint-every", "4"),
        *("--steps", "1000000", "--no-tensorboard", "--run-dir", str(tmp_path / "run"), "--processes.distributed"),
        *("--processes.coordinator", address, "--processes.num-processes", "2", "--processes.process-id"),
    ]  # fmt: skip
    runs = [child("atlasjax.cli", *options, str(index), wait=False) for index in range(2)]
    while not (tmp_path / "run/checkpoints/4").is_dir():
        assert [run.poll() for run in runs] == [None, None], runs[0].stderr.read()[-2000:]
        time.sleep(0.1)
    started = time.monotonic()
    runs[victim].kill()
    other = finish(runs[1 - victim])
    assert other.returncode == TRY_AGAIN, other.stderr[-2000:]
    assert time.monotonic() - started < 30
    finish(runs[victim])
    # jax may log while our line is written, so it need not be the last.
    (said,) = (
        line for line in other.stderr.splitlines() if line.startswith("atlasjax: Another process of this run has ended")
    )
    assert re.search(
        r"The last checkpoint is .*/checkpoints/\d+\. Run the same commands for all processes to resume\.", said
    )


@pytest.mark.slow  # the service is jax's; one process stops by a signal in test_loop
def test_a_notice_to_one_process_stops_both_after_the_same_step(tmp_path):
    address = coordinator()
    run = config(tmp_path, mesh=MeshConfig(1, 2), steps=300, checkpoint_every=0, log_every=200)
    runs = []
    for index in range(2):
        place = dataclasses.replace(run, processes=ProcessConfig(True, address, 2, index))
        step = 3 if index else -1
        runs.append(child("tests.train.child", to_dict(place), str(step), str(int(signal.SIGTERM)), wait=False))
    results = [finish(run) for run in runs]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr[-3000:]
    stopped = [re.search(r"Stopped by signal 15 after step (\d+), saved in", result.stdout) for result in results]
    steps = {int(found[1]) for found in stopped if found}
    assert all(stopped)
    assert len(steps) == 1
    (step,) = steps
    assert 3 < step < 200  # long before the next step at which a signal to Python would be seen
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
