"""The learning-rate schedule, and which parameters decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.nn import ModelConfig, logical_axes
from atlasjax.train import OptimizerConfig
from atlasjax.train import state as state_lib
from atlasjax.train.optimizer import decay_mask, learning_rate, make_optimizer


def test_schedule():
    rate = learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1), steps=21)
    values = np.array([rate(step) for step in range(25)])
    np.testing.assert_allclose(values[:5], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)  # linear, then the peak
    np.testing.assert_allclose(values[12], 1.1, rtol=1e-6)  # half-way down: the mean of peak and floor
    np.testing.assert_allclose(values[20:], 0.2, rtol=1e-6)  # the floor at the last step, and after it
    assert (np.diff(values[4:21]) < 0).all()


def test_warm_up_stable_decay():
    config = OptimizerConfig(
        schedule="wsd", learning_rate=1.0, warmup_steps=10, decay_fraction=0.25, final_fraction=0.2
    )
    rate = learning_rate(config, 100)
    np.testing.assert_allclose([rate(0), rate(9), rate(10), rate(74), rate(75)], [0.1, 1, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose([rate(87), rate(99), rate(150)], [0.6, 0.2, 0.2], rtol=1e-6)
    falling = np.asarray(rate(np.arange(75, 100)))
    assert (np.diff(falling) < 0).all()


def test_a_decay_never_begins_in_the_warm_up():
    rate = learning_rate(OptimizerConfig(schedule="wsd", learning_rate=1.0, warmup_steps=50, decay_fraction=1.0), 100)
    np.testing.assert_allclose([rate(49), rate(50), rate(99)], [1, 1, 0.1], rtol=1e-6)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 5), (10, 5), (5, 5)])
def test_schedule_of_short_runs_is_finite_and_positive(warmup, steps):
    rate = learning_rate(OptimizerConfig(warmup_steps=warmup), steps)
    values = np.array([rate(step) for step in range(steps)])
    assert np.isfinite(values).all()
    assert (values > 0).all()


def test_only_matrices_decay():
    mask = decay_mask(state_lib.pure(logical_axes(ModelConfig())))
    _, shapes = state_lib.model_shapes(ModelConfig())
    decays = {
        jax.tree_util.keystr(path, simple=True, separator="."): value
        for path, value in jax.tree_util.tree_flatten_with_path(mask)[0]
    }
    assert decays["embedding"]
    assert not decays["norm.scale"]
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]
    }
    for name, shape in sizes.items():
        if "norm" in name or "bias" in name or "conv" in name or "coefficients" in name:
            assert not decays[name], f"{name} {shape} decays"
        elif "kernel" in name or ".weights." in name:
            assert decays[name], f"{name} {shape} does not decay"


def test_decay_is_decoupled_and_masked():
    params = {"matrix": jnp.full((2, 2), 3.0), "bias": jnp.full((2,), 3.0)}
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.1)
    optimizer = make_optimizer(config, 10, {"matrix": True, "bias": False})
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -0.5 * 0.1 * 3.0, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0.0)


def test_clipping_keeps_small_gradients():
    config = OptimizerConfig(
        learning_rate=1.0, warmup_steps=0, weight_decay=0.0, b1=0.0, b2=0.0, eps=1.0, clip_norm=1.0
    )
    optimizer = make_optimizer(config, 10, {"w": False})
    params = {"w": jnp.zeros(1)}
    for gradient, clipped in ((0.5, 0.5), (50.0, 1.0)):
        updates, _ = optimizer.update({"w": jnp.full(1, gradient)}, optimizer.init(params), params)
        np.testing.assert_allclose(updates["w"], -clipped / (clipped + 1.0), rtol=1e-6)  # Adam of one step with eps = 1


def test_a_run_can_go_on_with_or_without_clipping():
    params = {"w": jnp.zeros((2, 2))}
    states = [make_optimizer(OptimizerConfig(clip_norm=norm), 10, {"w": True}).init(params) for norm in (None, 1.0)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
