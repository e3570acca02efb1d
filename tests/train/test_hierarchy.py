"""The two stages of training a model with TNT's memory: a run with smaller local chunks starts from another run."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from atlasjax.cli import main
from atlasjax.nn import HierarchyConfig, MemoryConfig
from atlasjax.train import initial, load_run, train
from atlasjax.train.saving.runs import run_config
from tests.train.tiny import MODEL, config

pytestmark = pytest.mark.usefixtures("compile_fast")
HIERARCHY = HierarchyConfig(global_chunk=8, local_chunks=(4,), restart=8)
COARSE = dataclasses.replace(
    MODEL, num_layers=1, memory=MemoryConfig("delta_rule", hierarchy=HIERARCHY, rule_options='{"chunk_size": 4}')
)


def with_hierarchy(**changes):
    memory = dataclasses.replace(COARSE.memory, hierarchy=dataclasses.replace(HIERARCHY, **changes))
    return dataclasses.replace(COARSE, memory=memory)


def test_only_fine_chunks_may_change(tmp_path, monkeypatch):
    base = config(tmp_path, model=COARSE, run_dir=str(tmp_path / "coarse"))
    monkeypatch.setattr(initial, "run_config", lambda folder: base)
    monkeypatch.setattr(initial, "complete_steps", lambda folder: ["1"] if "coarse" in str(folder) else [])
    new = lambda **changes: config(tmp_path, model=with_hierarchy(**changes), init_from=base.run_dir)
    initial.check_base(new(fine_chunks=(2,)))
    initial.check_base(new())
    for changes in ({"local_chunks": (2,)}, {"projected": False}, {"local_chunks": (4, 4), "fine_chunks": (2, 2)}):
        with pytest.raises(
            ValueError, match=r"another architecture \(model.memory.hierarchy.*fine_chunks of a hierarchy may"
        ):
            initial.check_base(new(**changes))


def test_both_stages_from_the_command_line(tmp_path):
    """The second stage begins with the parameters of the first, and one step of it is a step with its own chunks."""
    first = config(tmp_path, model=COARSE, steps=1, data_changes={"validation_fraction": 0.0})
    train(first)
    fine = tmp_path / "fine"
    options = [
        "--init-from",
        first.run_dir,
        "--run-dir",
        str(fine),
        "--steps",
        "1",
        "--optimizer.learning-rate",
        "1e-30",
    ]
    assert main(["train", *options, "--model.memory.hierarchy.fine-chunks", "2"]) == 0
    assert run_config(fine).model == with_hierarchy(fine_chunks=(2,))
    params = [jax.tree.leaves(nnx.state(load_run(folder).model, nnx.Param)) for folder in (first.run_dir, fine)]
    assert all(jnp.array_equal(a, b) for a, b in zip(*params, strict=True))
