"""Parts of a user's own that are unusual but legitimate agree with the definition, and those that cannot work are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import objectives, optimizers, retention, structures
from tests.marks import if_slow, some_slow


@dataclasses.dataclass(frozen=True)
class Shrink(retention.Retention):
    """A decay without a gate."""

    gate = None
    decay_first: bool = False

    def decay(self, weight, alpha):
        return 0.5 * alpha * weight


@dataclasses.dataclass(frozen=True)
class EverySecond(optimizers.GradientDescent):
    """Gradient descent, and known to be linear, of which only every second step is taken."""

    every = 2
    is_linear = True


@dataclasses.dataclass(frozen=True)
class Unsorted(structures.Structure):
    """Its outermost weight is not the first one by name."""

    def weight_shapes(self, feature_dim, value_dim):
        return {"out": (value_dim, 2 * value_dim), "hidden": (2 * value_dim, feature_dim)}

    def apply(self, linear, x, skip, norm):
        return linear("out", jnp.tanh(linear("hidden", x)))


@dataclasses.dataclass(frozen=True)
class Unsummed(objectives.Objective):
    def loss(self, out, v, threshold=None):
        return (out - v) ** 2


class Summed(Unsorted):
    def apply(self, linear, x, skip, norm):
        return jnp.sum(super().apply(linear, x, skip, norm), axis=-1)


@dataclasses.dataclass(frozen=True)
class Soft(retention.Retention):
    def decay(self, weight, alpha):
        return jnp.sign(weight) * jnp.maximum(jnp.abs(alpha * weight) - 1e-3, 0.0)


@dataclasses.dataclass(frozen=True)
class SoftFirst(Soft):
    """As strong a threshold as a bound can see, and gradients at the decayed memory."""

    decay_first: bool = True

    def decay(self, weight, alpha):
        return jnp.sign(weight) * jnp.maximum(jnp.abs(alpha * weight) - 0.05, 0.0)


@dataclasses.dataclass(frozen=True)
class Squashed(retention.Retention):
    """A map, which nothing but its definition announces."""

    decay_first: bool = False
    is_linear = True

    def map(self, accumulator):
        return jnp.tanh(accumulator)


@dataclasses.dataclass(frozen=True)
class Ball(retention.Retention):
    """A map of a whole matrix to the unit ball, written for one matrix."""

    def start(self, accumulator):
        return accumulator - jnp.mean(accumulator)

    def map(self, accumulator):
        accumulator = accumulator - jnp.mean(accumulator)
        return accumulator / jnp.sqrt(1.0 + jnp.sum(accumulator * accumulator))


@dataclasses.dataclass(frozen=True)
class LinearBall(Ball):
    is_linear = True


@dataclasses.dataclass(frozen=True)
class PostNorm(structures.Structure):
    """Does not add its residual last."""

    residual = True
    norm = True

    def weight_shapes(self, feature_dim, value_dim):
        return {"W1": (value_dim, value_dim), "W2": (value_dim, feature_dim)}

    def apply(self, linear, x, skip, norm):
        return structures.layer_norm(skip + linear("W1", jnp.tanh(linear("W2", x))), norm)


@dataclasses.dataclass(frozen=True)
class Anchor(optimizers.Optimizer):
    """Keeps the first memory."""

    def init(self, weights):
        return {"anchor": weights}

    def update(self, state, gradient, step_size, momentum_decay):
        return {name: -step_size * g for name, g in gradient.items()}, state


def _call(rule, run=memory.scan, time=8, dtype=jnp.float32, **options):
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)
    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, time, 1, 4), dtype) / 2
    gates = memory.suggested_gates(rule, batch_size=1, time=time, num_heads=1, key_dim=4)
    return run(rule, params, None, q, k, v, gates, **options)[0]


def _stepped(rule, params, state, q, k, v, gates):
    state, ys = memory.init_state(rule, params, batch_size=1, max_length=q.shape[1]), []
    for t in range(q.shape[1]):
        now = lambda x, t=t: x[:, t]
        y, state = memory.step(rule, params, state, *map(now, (q, k, v)), jax.tree.map(now, gates))
        ys.append(y)
    return jnp.stack(ys, axis=1), state


_MLP = structures.MLP(expansion=1)


@pytest.mark.parametrize(
    "rule",
    [
        memory.MemoryRule(_MLP, retention=Shrink(), chunk_size=4),
        if_slow(memory.MemoryRule(retention=Shrink(), chunk_size=1)),
        memory.MemoryRule(_MLP, optimizer=EverySecond(), chunk_size=4),
        memory.MemoryRule(optimizer=EverySecond(), chunk_size=2),
        if_slow(memory.MemoryRule(objective=objectives.DotProduct(), optimizer=EverySecond(), chunk_size=4)),
        memory.MemoryRule(Unsorted(), chunk_size=4, window=2),
        if_slow(memory.MemoryRule(structures.MLP(depth=10, expansion=2), chunk_size=4)),
        memory.MemoryRule(_MLP, retention=SoftFirst(), chunk_size=1),
        if_slow(memory.MemoryRule(structures.Matrix(), retention=Squashed(decay_first=True), chunk_size=1)),
        memory.MemoryRule(
            structures.Matrix(), optimizer=optimizers.GradientDescent(), retention=Squashed(True), chunk_size=1
        ),
        memory.MemoryRule(_MLP, retention=Ball(), chunk_size=4),
        memory.MemoryRule(_MLP, retention=LinearBall(), chunk_size=4),
    ],
    ids=[
        "decay", "decay of a matrix", "every", "every, matrix", "every, dot product", "names", "ten matrices",
        "soft threshold first", "map of the decayed, momentum", "map of the decayed", "map of a whole matrix",
        "linear, map of a whole matrix",
    ],
)  # fmt: skip
def test_as_the_definition(rule):
    expected = _call(rule, memory.reference)
    for run in (memory.scan, _stepped):
        np.testing.assert_allclose(_call(rule, run), expected, atol=1e-5 * jnp.abs(expected).max())


def test_a_map_is_found_where_it_is_defined():
    rule = lambda kind: memory.MemoryRule(structures.Matrix(), retention=kind, chunk_size=4)
    assert rule(Squashed()).retention.has_map
    assert jnp.abs(_call(rule(Squashed())) - _call(rule(retention.Scalar()))).max() > 1e-3
    np.testing.assert_allclose(_call(rule(Squashed())), _call(rule(Squashed()), memory.reference), atol=1e-6)


@pytest.mark.parametrize("kind", some_slow([Ball, LinearBall], [LinearBall]))
@pytest.mark.parametrize("wrap", [lambda rule: rule, lambda rule: memory.CachedRule(rule, segment_size=4)])
def test_a_map_of_a_whole_matrix_is_that_of_each_head(kind, wrap):
    """Two heads and two batch elements together are as each of them alone."""
    inner = memory.MemoryRule(_MLP, retention=kind(), chunk_size=4)
    rule = wrap(inner)
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    q, k, v = jax.random.normal(jax.random.key(1), (3, 2, 8, 2, 4)) / 2
    gates = memory.suggested_gates(rule, batch_size=2, time=8, num_heads=2, key_dim=4)
    y, state = memory.scan(rule, params, None, q, k, v, gates)
    reads = memory.read(rule, params, state, q)
    for row, head in ((0, 0), (1, 1)):
        one = lambda x, row=row, head=head: x[row : row + 1, :, head : head + 1]
        params_one = jax.tree.map(lambda x, head=head: x[head : head + 1], params)
        alone, after = memory.scan(rule, params_one, None, *map(one, (q, k, v)), jax.tree.map(one, gates))
        np.testing.assert_allclose(one(y), alone, atol=1e-6)
        np.testing.assert_allclose(one(reads), memory.read(rule, params_one, after, one(q)), atol=1e-6)
        if rule is inner:
            mapped = inner.retention.map(state.memory["W1"][row, head])
            np.testing.assert_allclose(inner.weights(state.memory)["W1"][row, head], mapped, atol=1e-6)


@pytest.mark.parametrize("wrapped", [memory.CachedRule, memory.LogLinearRule])
def test_a_residual_that_is_not_added_last_in_cached_memories(wrapped):
    rule = wrapped(memory.MemoryRule(PostNorm(), chunk_size=2), segment_size=4)
    expected = _call(rule, memory.reference)
    for run in (memory.scan, _stepped):
        np.testing.assert_allclose(_call(rule, run), expected, atol=1e-5 * jnp.abs(expected).max())


def test_a_fresh_state_that_keeps_the_first_memory_can_be_donated():
    rule = memory.MemoryRule(_MLP, optimizer=Anchor(), chunk_size=2)
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)
    gates = memory.suggested_gates(rule, batch_size=1, time=None, num_heads=1, key_dim=4)
    x, state = jnp.ones((1, 1, 4)), memory.init_state(rule, params, batch_size=1)
    y, _ = jax.jit(memory.step, static_argnums=0, donate_argnums=2)(rule, params, state, x, x, x, gates)
    assert jnp.isfinite(y).all()


def test_gradients_of_the_published_map_at_a_zero_memory():
    rule = memory.MemoryRule(structures.Matrix(), retention=retention.Lq(2.5, published=True), chunk_size=2)
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)
    x = jax.random.normal(jax.random.key(1), (1, 8, 1, 4)) / 2
    gates = memory.suggested_gates(rule, batch_size=1, time=8, num_heads=1, key_dim=4)
    loss = lambda run, x: jnp.sum(run(rule, params, None, x, x, x, gates)[0] ** 2)
    gradient, expected = (jax.grad(lambda x, run=run: loss(run, x))(x) for run in (memory.scan, memory.reference))
    assert jnp.isfinite(expected).all()
    np.testing.assert_allclose(gradient, expected, atol=1e-5 * jnp.abs(expected).max())


@pytest.mark.parametrize("rule", [rules.titans(4), memory.MemoryRule(_MLP, retention=Soft(), chunk_size=4)])
def test_float32_where_float64_is_the_default(rule, x64):
    expected = _call(rule, memory.reference)
    y = _call(rule)
    assert y.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(y, expected, atol=1e-5 * jnp.abs(expected).max())


def test_dtypes_of_parameters_and_gates_where_float64_is_the_default(x64):
    params = memory.init_params(rules.ttt_linear(), jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)
    cached = memory.CachedRule(rules.delta_rule(), segment_size=4)
    gates = memory.suggested_gates(cached, batch_size=1, time=2, num_heads=1, key_dim=4)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, gates))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: memory.MemoryRule(retention=Shrink(decay_first=True), chunk_size=1),
            "without a gate there is no decay",
        ),
        (lambda: memory.SoftmaxRule(optimizer=EverySecond(), chunk_size=4), "a softmax memory writes every token"),
        (lambda: _call(memory.SoftmaxRule(objective=Unsummed(), chunk_size=4)), "Unsummed.loss returned shape"),
        (lambda: _call(memory.SoftmaxRule(Summed(), chunk_size=4)), "Summed.apply returned shape"),
        (lambda: structures.MLP(norm="no"), "MLP: norm must be True or False"),
        (lambda: retention.Lq(published="no"), "Lq: published must be True or False"),
        (lambda: optimizers.GradientDescent(per_channel="yes"), "GradientDescent: per_channel must be True or False"),
        (lambda: memory.features.TensorSketch(seed="a"), "TensorSketch: seed must be an integer"),
    ],
)
def test_what_cannot_work_is_refused(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("inner", [rules.delta_rule(), rules.titans(4)])
def test_a_fresh_log_linear_state_can_be_donated(inner):
    rule = memory.LogLinearRule(inner, segment_size=4, levels=3)
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)
    gates = memory.suggested_gates(rule, batch_size=1, time=None, num_heads=1, key_dim=4)
    x, state = jnp.ones((1, 1, 4)), memory.init_state(rule, params, batch_size=1)
    y, _ = jax.jit(memory.step, static_argnums=0, donate_argnums=2)(rule, params, state, x, x, x, gates)
    assert jnp.isfinite(y).all()


@pytest.mark.parametrize("wrapped", [memory.CachedRule, memory.LogLinearRule])
def test_segments_that_cannot_go_on(wrapped):
    rule, ids = wrapped(rules.delta_rule(), segment_size=4), jnp.array([[0] * 3 + [1] * 5])
    np.testing.assert_array_equal(_call(rule, segment_ids=ids, truncation=8), _call(rule, segment_ids=ids))
    with pytest.raises(ValueError, match="truncation is 4 with segment_ids and 8 tokens"):
        _call(rule, segment_ids=ids, truncation=4)


def test_sizes_of_numpy():
    rule, two = rules.delta_rule(), np.int64(2)
    params = memory.init_params(rule, jax.random.key(0), num_heads=two, key_dim=two, value_dim=two)
    gates = memory.suggested_gates(rule, batch_size=two, time=two, num_heads=two, key_dim=two)
    assert memory.init_state(rule, params, batch_size=two).memory["W"].shape == (2, 2, 2, 2)
    assert gates.step_size.shape == (2, 2, 2)


@pytest.mark.parametrize("size", [(2,), {}, 1.0, True, None])
def test_a_batch_size_is_an_integer(size):
    rule = rules.delta_rule()
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=2)
    with pytest.raises(ValueError, match="batch_size must be an integer ≥ 1"):
        memory.init_state(rule, params, batch_size=size)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64])
def test_connectors_and_blends_are_floating_point(dtype):
    rule = memory.CachedRule(rules.delta_rule(), segment_size=4, blended=True)
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)
    state, q = memory.init_state(rule, params, batch_size=1, max_length=8), jnp.ones((1, 2, 1, 4))
    for given in ({"connector": q.astype(dtype)}, {"blend": q[..., 0].astype(dtype)}):
        with pytest.raises(TypeError, match="must be floating point"):
            memory.read(rule, params, state, q, **given)


def test_a_path_is_a_string(tmp_path):
    rule = rules.delta_rule()
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=2)
    with pytest.raises(TypeError, match="a path must be a string or a path object, got None"):
        memory.save(rule, params, memory.init_state(rule, params, batch_size=1), None)
