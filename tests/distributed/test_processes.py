"""Two processes train together as one does (gloo on the CPU), and one goes on from their checkpoint."""

import dataclasses
import socket

import numpy as np

from atlasjax.config_json import to_dict
from atlasjax.distributed import MeshConfig, ProcessConfig
from atlasjax.train import train
from tests.train.tiny import child, config, finish, train_losses


def test_two_processes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    alone = config(tmp_path, run_dir=str(tmp_path / "alone"), mesh=MeshConfig(1, 2), steps=6, eval_batches=2)
    together = dataclasses.replace(alone, run_dir=str(tmp_path / "together"), steps=4)
    runs = []
    for index in range(2):
        run = dataclasses.replace(together, processes=ProcessConfig(True, address, 2, index))
        runs.append(child("tests.train.child", to_dict(run), "-1", wait=False))
    train(alone)
    results = [finish(run) for run in runs]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr[-3000:]
    assert "step" in results[0].stdout
    assert "step" not in results[1].stdout  # one of the processes speaks
    resumed = train(dataclasses.replace(alone, run_dir=together.run_dir))
    assert (resumed.resumed_from, resumed.step) == (4, 6)
    expected, found = train_losses(alone.run_dir), train_losses(together.run_dir)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    # The schedule of the shorter run differs from its third step on: compare the steps before.
    np.testing.assert_allclose([loss for _, loss in found[:3]], [loss for _, loss in expected[:3]], rtol=1e-5)
