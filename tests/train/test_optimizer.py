"""The learning-rate schedule, which parameters decay, and optimizers of optax: on a mesh, and on stacked layers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.nn import ModelConfig, logical_axes
from atlasjax.train import OptimizerConfig
from atlasjax.train import state as state_lib
from atlasjax.train.optimizer import check_optimizer, decay_mask, learning_rate, make_optimizer, muon_axes, updated
from tests.marks import if_slow
from tests.train.tiny import MODEL

pytestmark = pytest.mark.usefixtures("compile_fast")


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


@pytest.mark.parametrize(
    ("axes", "read", "written"),
    [
        (("layers", "heads", "embed"), 1, (2,)),
        (("layers", "embed", "heads", None), 1, (2, 3)),  # the heads' channels
        (("layers", "embed", None, "mlp"), 1, (3,)),  # two projections
        (("layers", "heads", "memory_out", "memory_in"), 3, 2),
        (("layers", None, "heads", "memory_out", "rank"), 4, 3),  # the factors of LaCT's initial memory
        (("layers", None, "heads", "rank", "memory_in"), 4, 3),
        (("layers", "memory_in", "embed"), 1, (2,)),
    ],
)
def test_the_matrices_of_muon(axes, read, written):
    assert muon_axes({"w": P(*axes)}) == {"w": optax.contrib.MuonDimensionNumbers(read, written)}


@pytest.mark.parametrize(
    "axes", [("vocab", "embed"), ("embed", "vocab"), ("layers", "embed"), ("layers", "conv", "heads")]
)
def test_what_muon_leaves_to_adam(axes):
    assert muon_axes({"w": P(*axes)}) == {"w": None}


def test_muon_orthogonalizes_the_matrix_of_each_layer():
    axes = {
        "kernel": P("layers", "embed", "heads", None),
        "stack": P("layers", "embed", None, "mlp"),
        "norm": P("layers", "embed"),
    }
    shapes = {"kernel": (2, 8, 2, 3), "stack": (2, 8, 2, 6), "norm": (2, 8)}
    gradients = {name: jax.random.normal(jax.random.key(i), shapes[name]) for i, name in enumerate(axes)}
    config = OptimizerConfig(name="optax.contrib:muon", learning_rate=1.0, warmup_steps=0, clip_norm=None)
    optimizer = make_optimizer(config, 10, decay_mask(axes), muon_axes(axes))
    first = lambda optimizer: jax.jit(
        lambda gradients: optimizer.update(gradients, optimizer.init(gradients), gradients)[0]
    )
    updates, alone = first(optimizer)(gradients), first(optax.contrib.muon(1.0))

    for layer in range(2):
        expected = alone(gradients["kernel"][layer].reshape(8, 6)).reshape(8, 2, 3)
        np.testing.assert_allclose(updates["kernel"][layer], expected, rtol=1e-4, atol=1e-5)
        for part in range(2):
            expected = alone(gradients["stack"][layer, :, part])
            np.testing.assert_allclose(updates["stack"][layer, :, part], expected, rtol=1e-4, atol=1e-5)
    size = np.abs(updates["norm"])
    np.testing.assert_allclose(size, size[0, 0], rtol=1e-4)  # the first step of Adam


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("optax:lion", {}),
        ("optax:adafactor", {"min_dim_size_to_factor": 8}),
        if_slow("optax:novograd", {}),
        ("optax.contrib:muon", {"weight_decay": 0.1}),
    ],
)
def test_a_step_on_a_mesh_is_the_step_of_one_device(name, options):
    """Also where the state has no array, or an array of another shape, for a parameter."""
    axes = state_lib.pure(logical_axes(MODEL))
    config = OptimizerConfig(name=name, options=options, learning_rate=0.01, warmup_steps=0)
    optimizer = make_optimizer(config, 10, decay_mask(axes), muon_axes(axes))
    _, shapes = state_lib.model_shapes(MODEL)
    rng = np.random.default_rng(0)
    random = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)
    params, gradients = jax.tree.map(random, shapes), jax.tree.map(random, shapes)

    def step(params, gradients):
        updates, state = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates), state

    expected = jax.jit(step)(params, gradients)
    shardings, _ = state_lib.state_shardings(MODEL, optimizer, make_mesh(MeshConfig(1, 2, 2)))
    place = lambda tree: jax.device_put(tree, shardings.params)
    made = jax.jit(step, out_shardings=(shardings.params, shardings.optimizer))(place(params), place(gradients))
    chex.assert_trees_all_close(jax.device_get(made), jax.device_get(expected), rtol=1e-3, atol=1e-5)
    split = [x for x in jax.tree.leaves(made[1]) if not x.sharding.is_fully_replicated]
    assert split, "nothing of the state is split"


@pytest.mark.parametrize("name", ["optax.contrib:momo", "optax.contrib:momo_adam"])
def test_an_optimizer_that_takes_the_loss(name):
    config = OptimizerConfig(name=name, learning_rate=0.1, schedule="constant", warmup_steps=0)
    optimizer = make_optimizer(config, 50, {"x": True})
    loss, params = (lambda params: jnp.sum((params["x"] - 3.0) ** 2)), {"x": jnp.zeros(4)}
    check_optimizer(config, optimizer, jax.eval_shape(lambda: params))

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = updated(optimizer, grads, state, params, value)
        return optax.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    for _ in range(50):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < 0.1 * values[0]
