"""The bound of self-modifying Titans: its formula where it acts, streams and packed rows, and large weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import ModelConfig, SelfModifyingConfig
from atlasjax.nn.mixers import MIXERS
from tests import comparisons
from tests.nn.self_modifying_formula import self_modifying
from tests.streams import streamed

pytestmark = pytest.mark.usefixtures("compile_fast")
CONFIG = ModelConfig(
    dim=12, num_heads=2, dtype="float32", self_modifying=SelfModifyingConfig(4, generator_chunk=2, expansion=2)
)


@functools.cache
def layer(bounded):
    """(config, graphdef, initial parameters)."""
    given = dataclasses.replace(CONFIG.self_modifying, bounded=bounded)
    config = dataclasses.replace(CONFIG, self_modifying=given)
    return config, *nnx.split(MIXERS["self_modifying_titans"](config, rngs=nnx.Rngs(0)), nnx.Param)


def run(bounded, params, x):
    return jax.jit(lambda p, x: nnx.merge(layer(bounded)[1], p)(x))(params, x)


def inputs(time):
    return jax.random.normal(jax.random.key(1), (2, time, 12))


def scaled(steps, memory):
    """Parameters with larger step sizes, and a larger memory."""
    params = nnx.clone(layer(True)[2])
    params["step_size"]["skip"][...] *= steps
    params["memory"]["W1"][...] *= memory
    return params


close = functools.partial(comparisons.close, tolerance=2e-5)


@pytest.mark.parametrize(("bounded", "steps", "memory"), [(True, 45, 1), (True, 3000, 4000), (False, 45, 1)])
def test_formula_with_large_steps_and_weights(bounded, steps, memory):
    params, x = scaled(steps, memory), inputs(14)
    values = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    y, other = run(bounded, params, x), run(not bounded, params, x)
    for row in range(2):
        close(y[row], self_modifying(values, np.asarray(x[row], np.float64), layer(bounded)[0]))
    assert not np.abs(y - other).max() < 1e-3  # the bound acts


def test_bounded_streams_and_packed_rows():
    _, graphdef, _ = layer(True)
    params, x = scaled(3000, 4000), inputs(14)
    whole = run(True, params, x)
    extend = jax.jit(lambda p, x, state: nnx.merge(graphdef, p).extend(x, state))
    for cuts in (range(15), (0, 5, 6, 9, 14)):
        empty = nnx.merge(graphdef, params).init_state(2)
        close(streamed(functools.partial(extend, params), x, empty, cuts)[0], whole)
    ids = jnp.array([[0] * 5 + [1] * 9, [2] * 14])
    packed = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x, ids, 2))(params, x)
    close(packed[0, 5:], run(True, params, jnp.roll(x, -5, axis=1))[0, :9])
    close(packed[1], whole[1])


def test_bound_does_not_act_at_initial_values():
    params, x = layer(True)[2], inputs(64)
    np.testing.assert_array_equal(run(True, params, x), run(False, params, x))


def test_large_weights_stay_finite():
    """The loss and its gradients of 512 tokens."""
    _, graphdef, params = layer(True)
    x = inputs(512)
    weights = jax.random.normal(jax.random.key(2), x.shape)
    loss = jax.jit(jax.value_and_grad(lambda p: jnp.sum(weights * nnx.merge(graphdef, p)(x))))
    for factor in (30, 1000):
        for leaf in jax.tree.leaves(loss(jax.tree.map(lambda w, factor=factor: factor * w, params))):
            assert np.all(np.isfinite(leaf))
