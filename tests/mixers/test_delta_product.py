"""Several writes for each token against the recurrence token by token in NumPy: values, streams, packed rows, refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.mixers.delta_product import interleaved, last_reads
from tests.comparisons import close

BATCH, TIME, HEADS, KEY, VALUE = 2, 13, 3, 4, 5

pytestmark = pytest.mark.usefixtures("compile_fast")


def inputs(writes, channels=False, seed=0):
    """q, k, v, α and β, float32. The second token forgets everything."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    k = normal(BATCH, TIME, writes, HEADS, KEY)
    k /= np.sqrt((k * k).sum(-1, keepdims=True))
    alpha = rng.uniform(0.5, 1, (BATCH, TIME, HEADS, *([KEY] if channels else []))).astype(np.float32)
    alpha[:, 1] = 0
    beta = rng.uniform(0, 2, k.shape[:-1]).astype(np.float32)
    return normal(BATCH, TIME, HEADS, KEY), k, normal(BATCH, TIME, writes, HEADS, VALUE), alpha, beta


def definition(q, k, v, alpha, beta, ids=None):
    y = np.zeros((BATCH, TIME, HEADS, VALUE))
    for row, head in np.ndindex(BATCH, HEADS):
        W = np.zeros((VALUE, KEY))
        for t in range(TIME):
            if ids is not None and t and ids[row, t] != ids[row, t - 1]:
                W = np.zeros((VALUE, KEY))
            W = W * alpha[row, t, head]
            for j in range(k.shape[2]):
                one = k[row, t, j, head].astype(np.float64)
                W = W + beta[row, t, j, head] * np.outer(v[row, t, j, head] - W @ one, one)
            y[row, t, head] = W @ q[row, t, head]
    return y


def product(rule, q, k, v, alpha, beta, state=None, ids=None, function=memory.scan, **options):
    rows = interleaved(q, k, v, memory.Gates(retention=alpha, step_size=beta), ids)
    params = memory.MemoryParams({"W": jnp.zeros((HEADS, VALUE, KEY))}, None, None)
    y, state = function(rule, params, state, *rows[:4], segment_ids=rows.segment_ids, **options)
    return last_reads(y, k.shape[2]), state


@pytest.mark.parametrize("writes", [2, 3])
def test_writes_of_a_token_are_its_rows(writes):
    given, rule = inputs(writes), rules.gated_delta_rule()
    expected = definition(*given)
    whole, after = product(rule, *given)
    close(whole, expected)
    close(product(rule, *given, function=memory.reference)[0], expected)
    first, state = product(rule, *(x[:, :6] for x in given))
    second, state = product(rule, *(x[:, 6:] for x in given), state)
    close(jnp.concatenate([first, second], 1), expected)
    jax.tree.map(close, state.memory, after.memory)


def test_a_packed_row_starts_anew_and_decays_may_be_per_channel():
    given = inputs(3, channels=True)
    rule = rules.pkda()  # with k as its read key too
    ids = np.array([[0] * 4 + [2] * 9, [1] * 5 + [0] * 2 + [1] * 6])
    q, k, v, alpha, beta = given
    rows = interleaved(q, k, v, memory.Gates(alpha, beta, removal_key=k), ids)
    params = memory.MemoryParams({"W": jnp.zeros((HEADS, VALUE, KEY))}, None, None)
    scan = jax.jit(functools.partial(memory.scan, rule, params, None, max_segments=3))
    close(last_reads(scan(*rows[:4], segment_ids=rows.segment_ids)[0], 3), definition(*given, ids))


def test_gradients_are_those_of_the_reference():
    given, weights = inputs(2), np.cos(np.arange(BATCH * TIME * HEADS * VALUE)).reshape(BATCH, TIME, HEADS, VALUE)
    total = lambda function: lambda *x: jnp.sum(weights * product(rules.gated_delta_rule(), *x, function=function)[0])
    got, expected = (jax.jit(jax.grad(total(f), range(5)))(*given) for f in (memory.scan, memory.reference))
    jax.tree.map(close, got, expected)


Q, K, V, ALPHA, BETA = inputs(2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"q": Q[:, :-1]}, r"interleaved: k has shape \(2, 13, 2, 3, 4\), must be \[batch=2, time=12, writes"),
        ({"k": K[:, :, 0]}, r"interleaved: k has shape \(2, 13, 3, 4\), must be \[.*writes, heads=3, key_dim=4\]"),
        ({"v": V[:, :, :1]}, r"interleaved: v has shape \(2, 13, 1, 3, 5\), must be \[.*writes=2"),
        (
            {"gates": memory.Gates(ALPHA, BETA[:, :, 0])},
            r"gates.step_size has shape .*, must be \[batch=2, time=13, writes=2",
        ),
        (
            {"gates": memory.Gates(BETA, BETA)},
            r"gates.retention has shape .*, must be \[batch=2, time=13, heads=3, key_dim=4\]",
        ),
        ({"gates": memory.Gates(ALPHA, BETA, threshold=BETA)}, "gates has threshold; a write can have step_size"),
        ({"gates": None}, "interleaved: gates must be a Gates, got None"),
        ({"segment_ids": np.zeros((2, 26), int)}, r"interleaved: segment_ids has shape \(2, 26\), must be \[2, 13\]"),
    ],
)
def test_refuses(changed, says):
    given = {"q": Q, "k": K, "v": V, "gates": memory.Gates(ALPHA, BETA)}
    with pytest.raises((TypeError, ValueError), match=says):
        interleaved(**given | changed)


def test_refuses_rows_that_are_not_of_tokens():
    with pytest.raises(ValueError, match="last_reads: y has 13 rows, which must be a multiple of writes=2"):
        last_reads(Q, 2)
    with pytest.raises(ValueError, match="writes"):
        last_reads(Q, 0)
