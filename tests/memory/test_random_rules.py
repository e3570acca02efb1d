"""Property-based: random rules, sizes and lengths; the engine is the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlasjax import memory
from atlasjax.memory import features, objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from tests.memory.cases import assert_close, make_inputs, objective


@st.composite
def memory_rules(draw):
    structure = draw(
        st.sampled_from(
            [
                structures.Matrix(),
                structures.MLP(expansion=2),
                structures.MLP(depth=1, norm=True),
                structures.MLP(depth=3, expansion=1, activation="tanh"),
                structures.GatedMLP(expansion=1, activation="silu"),
            ]
        )
    )
    chunk = draw(st.integers(1, 12))
    every = draw(st.sampled_from([d for d in range(1, chunk + 1) if chunk % d == 0]))
    window = draw(st.integers(1, 6))
    steps = [optimizers.GradientDescent(), optimizers.Momentum(), optimizers.Muon(2, "standard", every)]
    decays = [retention.Full(), retention.Scalar()]
    if chunk == 1:
        decays.append(retention.Scalar(decay_first=True))
    if isinstance(structure, structures.Matrix):
        decays.append(retention.Channel())
        if window == 1:
            steps.append(optimizers.GradientDescent(per_channel=True))
    optimizer = draw(st.sampled_from(steps))
    if not isinstance(optimizer, optimizers.Muon):
        decays.append(retention.KL())
    return MemoryRule(
        structure=structure,
        objective=draw(
            st.sampled_from([objectives.L2(), objectives.DotProduct(), objectives.Lp(3.0), objectives.Huber()])
        ),
        features=draw(
            st.sampled_from(
                [features.Identity(), features.Polynomial(2), features.Powers(2), features.TensorSketch(2, 4)]
            )
        ),
        optimizer=optimizer,
        retention=draw(st.sampled_from(decays)),
        window=window,
        chunk_size=chunk,
    )


def random_calls(examples):
    def decorate(test):
        given_call = given(
            rule=memory_rules(), time=st.integers(1, 30), cut=st.integers(0, 30), seed=st.integers(0, 100)
        )
        options = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
        return settings(max_examples=examples, **options)(given_call(test))

    return decorate


@random_calls(3)
def test_engine_is_the_reference(rule, time, cut, seed):
    compare(rule, time, cut, seed)


@pytest.mark.slow
@random_calls(100)
def test_engine_is_the_reference_many_times(rule, time, cut, seed):
    compare(rule, time, cut, seed)


def compare(rule, time, cut, seed):
    with jax.enable_x64(True):
        params, q, k, v, gates = make_inputs(rule, batch=1, heads=1, time=time, dtype=jnp.float64, seed=seed)
        expected, final = jax.jit(lambda: memory.reference(rule, params, None, q, k, v, gates))()
        cut = cut % time

        def streamed():
            state, outputs = None, []
            for start, stop in ((0, cut), (cut, time)):
                if start < stop:
                    piece = (x[:, start:stop] for x in (q, k, v))
                    piece_gates = jax.tree.map(lambda x, a=start, b=stop: x[:, a:b], gates)
                    y, state = memory.scan(rule, params, state, *piece, piece_gates)
                    outputs.append(y)
            return jnp.concatenate(outputs, axis=1), state

        y, state = jax.jit(streamed)()
        assert_close(y, expected, 1e-9)
        assert_close(state, final, 1e-9)


def extreme(kind, seed, q, k, v, gates):
    """The same inputs with some gates at the ends of their ranges, or with keys or values that are zero or equal."""
    rng = np.random.default_rng(seed)
    some = lambda x: rng.random(x.shape) < 0.35
    if kind == "gates":
        ends = {
            name: jnp.where(some(x), 0.0, jnp.where(some(x), 1.0, x))
            for name, x in gates._asdict().items()
            if x is not None and name in ("retention", "momentum_decay", "window_weights")
        }
        return q, k, v, gates._replace(**ends)
    if kind == "values":
        return q, k, jnp.where(some(v[..., :1]), 0.0, v), gates
    if kind == "keys":
        return q, jnp.where(some(k[..., :1]), 0.0, k), v, gates
    return q, jnp.broadcast_to(k[:, :1], k.shape), v, gates


@pytest.mark.slow  # test_engine.py has the extremes of the rules in its table
@random_calls(2)
def test_gradients_at_extremes(rule, time, cut, seed):
    compare_gradients(rule, time, cut, seed)


@pytest.mark.slow
@random_calls(60)
def test_gradients_at_extremes_many_times(rule, time, cut, seed):
    compare_gradients(rule, time, cut, seed)


def compare_gradients(rule, time, cut, seed):
    kind = ("gates", "values", "keys", "equal keys")[cut % 4]
    with jax.enable_x64(True):
        params, *inputs = make_inputs(rule, batch=1, heads=1, time=time, dtype=jnp.float64, seed=seed)
        if seed % 2 and rule.structure == structures.Matrix():
            params = params._replace(weights=jax.tree.map(jnp.zeros_like, params.weights))
        arrays = params, *extreme(kind, seed, *inputs)
        found, expected = (
            jax.jit(jax.grad(lambda *arrays, fn=fn: objective(fn, rule, *arrays)[0], argnums=(0, 1, 2, 3, 4)))(*arrays)
            for fn in (memory.scan, memory.reference)
        )
        assert_close(found, expected, 1e-7)
