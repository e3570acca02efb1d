"""The sharded training step with the memory's kernels, in interpret mode on eight devices, is the step without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.distributed import MeshConfig, global_batch, make_mesh
from atlasjax.memory.fast_weights import kernels
from atlasjax.nn import AttentionConfig, MemoryConfig, ModelConfig, logical_axes
from atlasjax.train import OptimizerConfig, TrainConfig
from atlasjax.train import state as state_lib
from atlasjax.train.optimizer import decay_mask, learning_rate, make_optimizer
from atlasjax.train.setup import prepare
from atlasjax.train.step import jit_train_step

pytestmark = pytest.mark.usefixtures("compile_fast")


def config(implementation, mixer="memory"):
    memory = MemoryConfig("titans", chunk_size=8, expansion=1, implementation=implementation)
    return ModelConfig(
        vocab_size=32, dim=16, num_layers=1, num_heads=2, ffn="none", memory=memory, dtype="float32", remat=True,
        mixer=mixer, attention=AttentionConfig(segment_size=8),
    )  # fmt: skip


def run(implementation, mixer="memory", documents=None):
    """Metrics and parameters after one step."""
    model, settings = config(implementation, mixer), OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
    optimizer = make_optimizer(settings, 4, decay_mask(state_lib.pure(logical_axes(model))))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    graphdef, _ = state_lib.model_shapes(model)
    shardings, _ = state_lib.state_shardings(model, optimizer, mesh)
    params = state_lib.init_params(model, jax.random.key(0))
    state = state_lib.TrainState(params, optimizer.init(params), jax.random.key(0), jnp.zeros((), jnp.int32))
    tokens = np.random.default_rng(0).integers(0, 32, (4, 17), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((4, 16), np.float32)}
    if documents is not None:
        batch["segment_ids"] = np.asarray(documents, np.int32)
    most = None if documents is None else 3
    step = jit_train_step(graphdef, optimizer, learning_rate(settings, 4), shardings, mesh, max_segments=most)
    after, metrics = step(jax.device_put(state, shardings), global_batch(batch, mesh))
    return jax.device_get((metrics["loss"], metrics["gradient_norm"], after.params))


DOCUMENTS = [np.repeat([0, 1, 2], lengths) for lengths in ([5, 8, 3], [16, 0, 0], [1, 1, 14], [8, 8, 0])]


@pytest.mark.parametrize(
    ("mixer", "documents", "time"),
    [
        pytest.param("memory", None, 16, marks=pytest.mark.slow),
        ("memory", DOCUMENTS, 40),  # places of up to three documents on the grid of chunks
        pytest.param("mac", None, 8, marks=pytest.mark.slow),
    ],
    ids=["memory", "packed", "mac"],
)
def test_sharded_step_with_kernels(mixer, documents, time, monkeypatch):
    calls = []

    def interpreted(*arguments, **options):
        calls.append(arguments[4].shape)
        return real(*arguments, interpret=True, **options)

    real = kernels.chunk_memory
    monkeypatch.setattr(kernels, "chunk_memory", functools.wraps(real)(interpreted))
    expected, found = (run(name, mixer, documents) for name in ("xla", "pallas_tpu"))
    assert set(calls) == {(1, time, 1, 8)}  # each device has one of four rows and one of two heads
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(a).max(), 1e-2), rtol=0)


def test_what_has_no_kernel():
    with pytest.raises(ValueError, match="has no kernel for"):
        MemoryConfig("dot", implementation="pallas_tpu")
    with pytest.raises(ValueError, match="Did you mean 'pallas_tpu'"):
        MemoryConfig("titans", implementation="pallas_tpus")


@pytest.mark.parametrize(("implementation", "devices"), [("pallas_tpu", "TPUs"), ("pallas_gpu", "GPUs")])
def test_a_run_without_such_devices_says_so(implementation, devices, tmp_path):
    run = TrainConfig(model=config(implementation), run_dir=str(tmp_path))
    with pytest.raises(ValueError, match=f"whose kernels run on {devices}; the devices here are cpu"):
        prepare(run)
