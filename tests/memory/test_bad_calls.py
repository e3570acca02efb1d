"""Calls that cannot be right are refused before anything is traced, in one line that names the argument."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import Gates
from atlasjax.memory.axes.objectives import Lp
from atlasjax.memory.axes.retention import Lq

B, T, H, D = 2, 6, 2, 4
RULE = rules.titans(chunk_size=4)
WINDOWED = rules.omeganet(chunk_size=4, window=3)


class Duck:
    shape, dtype, ndim = (B, T, H, D), np.dtype(np.float32), 4


def parts(rule=RULE):
    params = memory.init_params(rule, jax.random.key(0), num_heads=H, key_dim=D, value_dim=D)
    x = jnp.ones((B, T, H, D))
    channels = rule.gate_channels(D, D)
    gates = Gates(**{n: jnp.full((B, T, H) if c is None else (B, T, H, c), 0.1) for n, c in channels.items()})
    return params, x, gates


def scan(rule=RULE, *, params=None, state=None, q=None, gates=None, **options):
    own, x, given = parts(rule)
    q = x if q is None else q
    return memory.scan(rule, own if params is None else params, state, q, x, x, gates or given, **options)


def refused(call, words):
    with pytest.raises((TypeError, ValueError), match=words) as info:
        call()
    assert len(str(info.value).splitlines()) == 1


def test_a_state_of_longer_chunks():
    longer = rules.titans(chunk_size=8)
    _, state = scan(longer)
    refused(lambda: scan(state=state), r"state.position has the value 6, must be in \[0, 3\]")
    scan(longer, state=state)


@pytest.mark.parametrize("count", [-1, 3])
def test_window_counts_out_of_range(count):
    params, _, _ = parts(WINDOWED)
    state = memory.init_state(WINDOWED, params, batch_size=B)._replace(window_count=jnp.full((B,), count))
    refused(lambda: scan(WINDOWED, state=state), rf"state.window_count has the value {count}, must be in \[0, 2\]")


def test_segments_that_would_meet_when_cast():
    ids = np.array([[0] * 3 + [2**32] * 3] * B)
    refused(lambda: scan(segment_ids=ids), "segment_ids must be ≥ 0 and below 2.31, got 4294967296")


def test_infinite_step_sizes_are_seen():
    gates = parts()[2]._replace(step_size=jnp.full((B, T, H), jnp.inf))
    refused(lambda: scan(gates=gates, check_gates=True), r"gates.step_size must be in \[0, inf\), got inf")


OTHERS = {
    "float8": lambda x: np.asarray(x).astype(ml_dtypes.float8_e4m3fn),
    "big-endian": lambda x: np.asarray(x).astype(">f4"),
    "integer": lambda x: x.astype(jnp.int32),
    "complex": lambda x: x.astype(jnp.complex64),
    "abstract": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    "duck": lambda x: Duck(),
    "list": lambda x: np.asarray(x).tolist(),
    "None": lambda x: None,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_array_of_floats(kind):
    params, x, gates = parts()
    other = OTHERS[kind]
    q = other(x)
    refused(lambda: memory.scan(RULE, params, None, q, x, x, gates), "memory.scan: q must be")
    refused(
        lambda: memory.scan(RULE, params, None, x, x, x, gates._replace(retention=other(gates.retention))),
        "gates.retention",
    )
    for name, weight in params.weights.items():
        bad = params._replace(weights={**params.weights, name: other(weight)})
        refused(lambda bad=bad: scan(params=bad), rf"params.weights\['{name}'\]")
        refused(lambda bad=bad: memory.init_state(RULE, bad, batch_size=B), rf"params.weights\['{name}'\]")
    _, state = scan()
    refused(lambda: scan(state=state._replace(memory=jax.tree.map(other, state.memory))), "state")


@pytest.mark.parametrize("change", [lambda w: w[0], lambda w: w[:, :-1], lambda w: w[:1], lambda w: w[None]])
def test_weights_of_another_shape(change):
    rule = rules.titans(chunk_size=4)
    params, _, _ = parts(rule)
    for name in list(params.weights)[1:]:
        bad = params._replace(weights={**params.weights, name: change(params.weights[name])})
        refused(lambda bad=bad: scan(rule, params=bad), "params.weights")


@pytest.mark.parametrize("params", [{}, [], None, "x", 3])
def test_params_that_are_none(params):
    _, x, gates = parts()
    refused(lambda: memory.scan(RULE, params, None, x, x, x, gates), "params must be MemoryParams")


@pytest.mark.parametrize("rule", [None, "titans", rules.titans])
def test_rules_that_are_none(rule):
    refused(
        lambda: memory.init_params(rule, jax.random.key(0), num_heads=H, key_dim=D, value_dim=D),
        "rule must be a MemoryRule",
    )
    refused(lambda: memory.init_state(rule, parts()[0], batch_size=1), "rule must be a MemoryRule")


@pytest.mark.parametrize("params", ["x", None, {"a": 1}, [object()]])
def test_fresh_states_of_parameters_that_are_none(params):
    refused(lambda: memory.init_state(RULE, params, batch_size=B), "params must be MemoryParams")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (None, "got NoneType"),
        (0, "got int"),
        (np.ones(2, np.float32), "got an array of float32"),
        (jnp.zeros((2, 2), jnp.uint32), r"a single PRNG key, got keys of shape \(2,\)"),
    ],
)
def test_keys_that_are_none(key, words):
    refused(lambda: memory.init_params(RULE, key, num_heads=H, key_dim=D, value_dim=D), words)


def test_keys_of_both_kinds():
    make = lambda key: memory.init_params(RULE, key, num_heads=H, key_dim=D, value_dim=D)
    typed, raw = make(jax.random.key(3)), jax.jit(make)(jax.random.PRNGKey(3))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, typed, raw))


@pytest.mark.parametrize("size", [-1, 0, True, 1.5, None, "2", np.array([2]), jnp.array(2)])
def test_batch_sizes_that_are_none(size):
    refused(lambda: memory.init_state(RULE, parts()[0], batch_size=size), "batch_size must be an integer ≥ 1")


@pytest.mark.parametrize("implementation", ["", "xlaa", 3])
def test_implementations_that_are_none(implementation):
    refused(lambda: scan(implementation=implementation), "implementation")


@pytest.mark.parametrize("power", [float("inf"), float("nan"), 0.5, "3", True])
def test_powers_without_a_finite_loss(power):
    refused(lambda: Lp(p=power), "Lp: p must be ≥ 1 and finite")
    refused(lambda: Lq(q=power), "Lq: q must be ")
