"""The training step: accumulation, and the same numbers on every mesh."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from atlasjax.distributed import MeshConfig, global_batch, make_mesh
from atlasjax.nn import MemoryConfig, logical_axes
from atlasjax.train import OptimizerConfig, accumulated_gradients, jit_train_step, loss_sums
from atlasjax.train import state as state_lib
from atlasjax.train.optimizer import decay_mask, learning_rate, make_optimizer
from tests.marks import some_slow
from tests.train.tiny import MODEL

pytestmark = pytest.mark.usefixtures("compile_fast")

# These programs run once or twice: what they cost is their compilation.
QUICK = {"xla_backend_optimization_level": 0}


def make_batch(rows: int = 8, length: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (rows, length + 1)).astype(np.int32)
    weights = (rng.random((rows, length)) < 0.7).astype(np.float32)
    weights[::2, 4:] = (
        0.0  # microbatch i takes rows i, i + n, …: the microbatches have very different numbers of tokens
    )
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


@functools.cache
def params_of(model=MODEL):
    init = jax.jit(functools.partial(state_lib.init_params, model))
    return init.lower(jax.random.key(0)).compile(QUICK)(jax.random.key(0))


def test_loss_is_the_weighted_mean():
    graphdef, _ = state_lib.model_shapes(MODEL)
    batch = make_batch()
    total, weight = loss_sums(graphdef, params_of(), batch)
    logits = np.asarray(state_lib.merge(graphdef, params_of())(jnp.asarray(batch["inputs"])), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, batch["targets"][..., None], -1)[..., 0] * batch["weights"]
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-5)
    assert weight == batch["weights"].sum()


@pytest.mark.parametrize("microbatches", some_slow([2, 8], [2]))
def test_accumulation_changes_nothing(microbatches):
    graphdef, _ = state_lib.model_shapes(MODEL)
    batch = make_batch()
    step = jax.jit(accumulated_gradients, static_argnums=(0, 3))
    whole, parts = (
        step.lower(graphdef, params_of(), batch, n).compile(QUICK)(params_of(), batch) for n in (1, microbatches)
    )
    assert whole[2] == parts[2] == batch["weights"].sum()
    chex.assert_trees_all_close(whole[:2], parts[:2], rtol=2e-4, atol=1e-6)


def test_a_mean_of_means_would_be_noticed():
    """The batch of the test above tells weighting by tokens from averaging the microbatches."""
    rows = make_batch()["weights"].sum(axis=1)
    assert rows[::2].sum() < rows[1::2].sum() / 2


def test_a_batch_of_padding_only_has_loss_zero():
    graphdef, _ = state_lib.model_shapes(MODEL)
    batch = {**make_batch(), "weights": np.zeros((8, 16), np.float32)}
    step = jax.jit(accumulated_gradients, static_argnums=(0, 3)).lower(graphdef, params_of(), batch, 1).compile(QUICK)
    loss, grads, weight = step(params_of(), batch)
    assert loss == 0.0
    assert weight == 0.0
    assert all(np.all(np.asarray(leaf) == 0.0) for leaf in jax.tree.leaves(grads))


WIDE = dataclasses.replace(
    MODEL, dim=32, num_heads=4, mlp_dim=64, num_layers=1, memory=MemoryConfig(rule="delta_rule", chunk_size=8)
)


@functools.cache
def run(mesh_shape: tuple[int, int, int], accumulation: int = 1, model=WIDE, steps: int = 2):
    """(losses, gradient norms, final state) of two steps on a mesh."""
    mesh = make_mesh(MeshConfig(*mesh_shape))
    config = OptimizerConfig(
        learning_rate=1e-3, warmup_steps=0, eps=1e-3
    )  # Adam's sign-like first step amplifies rounding
    optimizer = make_optimizer(config, 10, decay_mask(state_lib.pure(logical_axes(model))))
    graphdef, _ = state_lib.model_shapes(model)
    shardings, skipped = state_lib.state_shardings(model, optimizer, mesh)
    assert skipped == []
    init = jax.jit(lambda key: state_lib.init_state(model, optimizer, key), out_shardings=shardings)
    state = init.lower(jax.random.key(0)).compile(QUICK)(jax.random.key(0))
    step = jit_train_step(graphdef, optimizer, learning_rate(config, 10), shardings, mesh, microbatches=accumulation)
    step = step.lower(state, global_batch(make_batch(), mesh)).compile(QUICK)
    losses, norms = [], []
    for i in range(steps):
        state, metrics = step(state, global_batch(make_batch(seed=i), mesh))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["gradient_norm"]))
    return losses, norms, state


SHARDED = [  # mesh and microbatches
    ((1, 4, 2), 2),
    ((8, 1, 1), 1),
    ((2, 2, 2), 1),
    ((1, 4, 2), 1),
    ((2, 2, 1), 2),
]


@pytest.mark.parametrize("sharded", some_slow(SHARDED, SHARDED[1:]), ids=str)
def test_sharded_training_is_unsharded_training(sharded):
    losses, norms, state = run((1, 1, 1))
    sharded_losses, sharded_norms, sharded_state = run(*sharded)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(sharded_norms, norms, rtol=1e-3)
    chex.assert_trees_all_close(
        jax.device_get(sharded_state.params), jax.device_get(state.params), rtol=1e-3, atol=2e-5
    )


def test_moments_live_where_their_parameters_live():
    _, _, state = run(*SHARDED[0])
    adam = next(
        part for part in jax.tree.leaves(state.optimizer, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
    )
    params = jax.tree.leaves(state.params)
    for moments in (adam.mu, adam.nu):
        for moment, param in zip(jax.tree.leaves(moments), params, strict=True):
            assert moment.sharding.is_equivalent_to(param.sharding, param.ndim)
    embedding = state.params["embedding"]
    assert embedding.sharding.spec == PartitionSpec("tensor", "fsdp")
    assert adam.mu["embedding"].addressable_shards[0].data.shape == (256 // 2, 32 // 4)
    held = sum(leaf.addressable_shards[0].data.size for leaf in params)
    assert held < 0.25 * sum(leaf.size for leaf in params)  # 1/8 but for what does not split
