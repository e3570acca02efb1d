"""Log-linear attention against its definition, pair by pair."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers import log_linear
from tests.comparisons import close
from tests.marks import some_slow

BATCH, HEADS, KEY, VALUE, LEVELS = 2, 2, 4, 3, 9
attention, step = jax.jit(log_linear.attention), jax.jit(log_linear.step)  # operation by operation takes far longer


def inputs(time, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal((BATCH, time, HEADS, *shape)), dtype)
    decay = jnp.asarray(rng.uniform(0.5, 1.0, (BATCH, time, HEADS)), dtype)
    return normal(KEY), normal(KEY), normal(VALUE), normal(LEVELS), decay, normal(KEY)


def definition(q, k, v, weights, decay):
    """Σ_s λ_t[level] (α_{s+1} … α_t) ⟨q_t, k_s⟩ v_s, nothing but the formula."""
    q, k, v, weights, decay = (np.asarray(x, np.float64) for x in (q, k, v, weights, decay))
    y = np.zeros((*q.shape[:3], v.shape[-1]))
    for t in range(q.shape[1]):
        for s in range(t + 1):
            share = weights[:, t, :, (t ^ s).bit_length()] * np.prod(decay[:, s + 1 : t + 1], axis=1)
            y[:, t] += (share * np.sum(q[:, t] * k[:, s], axis=-1))[..., None] * v[:, s]
    return y


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("time", [1, 2, 7, 16, 45, 130])
def test_values(time, x64):
    q, k, v, weights, decay, _ = inputs(time)
    close(jax.jit(log_linear.attention)(q, k, v, weights, decay), definition(q, k, v, weights, decay), 1e-11)
    close(jax.jit(log_linear.attention)(q, k, v, weights), definition(q, k, v, weights, jnp.ones_like(decay)), 1e-11)


def test_gradients(x64):
    args = inputs(37)[:5]

    def dense(q, k, v, weights, decay):
        t = jnp.arange(37)
        level = log_linear.level_of(t[:, None], t)
        share = jnp.take_along_axis(
            jnp.moveaxis(weights, 2, 1), jnp.broadcast_to(level, (BATCH, HEADS, 37, 37)), axis=3
        )
        total = jnp.cumsum(jnp.log(decay), axis=1)
        products = jnp.exp(jnp.moveaxis(total[:, :, None] - total[:, None], 3, 1))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * share * jnp.tril(products)
        return jnp.einsum("bhts,bshv->bthv", scores, v)

    weights = np.cos(np.arange(BATCH * 37 * HEADS * VALUE)).reshape(BATCH, 37, HEADS, VALUE)
    gradients = [
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(weights * f(*a)), argnums=(0, 1, 2, 3, 4)))(*args)
        for f in (log_linear.attention, dense)
    ]
    for actual, expected in zip(*gradients):
        close(actual, expected, 1e-10)


def test_weights_of_one_are_linear_attention(x64):
    q, k, v, weights, _, _ = inputs(45)
    scores = jnp.tril(jnp.einsum("bthd,bshd->bhts", q, k))
    close(attention(q, k, v, jnp.ones_like(weights)), jnp.einsum("bhts,bshv->bthv", scores, v), 1e-12)


def test_log_linear_plus_plus_weights(x64):
    """The softmax over {the token, the dyadic segments before it} of scores with their mean keys, from their definition."""
    _, k, _, _, _, u = inputs(45)
    actual = np.asarray(log_linear.segment_weights(u, k))
    k, u = np.asarray(k), np.asarray(u)
    for t in range(45):
        levels = np.array([(t ^ s).bit_length() for s in range(t + 1)])
        logits = {
            n: np.sum(u[:, t] * k[:, : t + 1][:, levels == n].mean(axis=1), axis=-1) for n in set(levels.tolist())
        }
        total = sum(np.exp(x) for x in logits.values())
        for level in range(actual.shape[-1]):
            want = np.exp(logits[level]) / total if level in logits else np.zeros((BATCH, HEADS))
            np.testing.assert_allclose(actual[:, t, :, level], want, atol=1e-12)


@pytest.mark.parametrize("plus_plus", [False, True])
def test_a_stream_is_the_whole(plus_plus, x64):
    q, k, v, weights, decay, u = inputs(45)
    if plus_plus:
        weights = log_linear.segment_weights(u, k)
    want = attention(q, k, v, weights, decay)
    state = log_linear.init_state(BATCH, HEADS, KEY, VALUE, 45)
    state = state._replace(states=state.states.astype(jnp.float64), key_sums=state.key_sums.astype(jnp.float64))
    levels = state.states.shape[2]

    def one(state, xs):
        q, k, v, w, a, u = xs
        chosen = {"connector": u} if plus_plus else {"weights": w[..., :levels]}
        y, state = log_linear.step(state, q, k, v, retention=a, **chosen)
        return state, y

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, weights, decay, u))
    _, y = jax.jit(lambda state, tokens: jax.lax.scan(one, state, tokens))(state, tokens)
    close(jnp.moveaxis(y, 0, 1), want, 1e-11)


def test_levels_do_not_depend_on_the_length(x64):
    q, k, v, weights, decay, _ = inputs(45)
    cut = jax.tree.map(lambda x: x[:, :19], (q, k, v, weights, decay))
    close(attention(*cut), attention(q, k, v, weights, decay)[:, :19], 1e-12)


def test_bfloat16_and_the_end_of_a_state():
    q, k, v, weights, decay, _ = inputs(40, jnp.bfloat16)
    y = attention(q, k, v, weights, decay)
    assert y.dtype == jnp.bfloat16
    close(y.astype(jnp.float32), definition(*(x.astype(jnp.float32) for x in (q, k, v, weights, decay))), 2e-2)
    state = log_linear.init_state(BATCH, HEADS, KEY, VALUE, 2)
    for t, finite in enumerate((True, True, False)):
        y, state = step(state, q[:, t], k[:, t], v[:, t], weights[:, t])
        assert bool(jnp.isfinite(y.astype(jnp.float32)).all()) == finite


def test_refused():
    q, k, v, weights, decay, _ = inputs(40, np.float32)
    with pytest.raises(ValueError, match=r"weights has shape .* must be \[2, 40, 2, 7\] or more levels"):
        log_linear.attention(q, k, v, weights[..., :6], decay)
    with pytest.raises(ValueError, match=r"k has shape"):
        log_linear.attention(q, k[:, :-1], v, weights, decay)
    with pytest.raises(ValueError, match="either weights or connector"):
        log_linear.step(log_linear.init_state(BATCH, HEADS, KEY, VALUE, 8), q[:, 0], k[:, 0], v[:, 0])
    with pytest.raises(ValueError, match="length must be an integer ≥ 1, got 0"):
        log_linear.num_levels(0)


def small(time=9):
    return inputs(time, np.float32)


def fresh():
    return log_linear.init_state(BATCH, HEADS, KEY, VALUE, 9)


def stepped(state=None, **changed):
    q, k, v, weights, retention, _ = (x[:, 0] for x in small())
    given = {"q": q, "k": k, "v": v, "weights": weights, "retention": retention, **changed}
    return log_linear.step(fresh() if state is None else state, **given)


def whole(function=log_linear.attention, *state, **changed):
    given = dict(zip(("q", "k", "v", "weights", "retention"), small()))
    return function(*state, **(given | changed))


def extended(**changed):
    return whole(log_linear.extend, fresh(), **changed)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v, u: whole(q=q.astype(int)), "log_linear.attention: q must be floating point, got int32"),
        (lambda q, k, v, u: whole(q=[1]), r"log_linear.attention: q must be an array \[batch, time, .*got list"),
        (lambda q, k, v, u: whole(v=v[:, :, :1]), r"v has shape \(2, 9, 1, 3\), must be \[batch=2, time=9, heads=2, value_dim\]"),
        (lambda q, k, v, u: whole(retention=1.0), "retention must be an array .* got float"),
        (lambda q, k, v, u: whole(weights=None), "weights must be an array .* got NoneType"),
        (lambda q, k, v, u: whole(segment_ids=jnp.zeros((2, 8), int)), r"segment_ids has shape \(2, 8\), must be \[2, 9\]"),
        (lambda q, k, v, u: whole(segment_ids=jnp.zeros((2, 9))), "attention: segment_ids must be integers, got float32"),
        (lambda q, k, v, u: log_linear.segment_weights(u, k[:, :8]), r"segment_weights: keys has shape .*\[batch=2, time=9"),
        (lambda q, k, v, u: log_linear.segment_weights(None, k), "log_linear.segment_weights: connector must be an array"),
        (lambda q, k, v, u: log_linear.segment_weights(u, k, [0]), "log_linear.segment_weights: segment_ids must be an array"),
        (lambda q, k, v, u: log_linear.step(None, q, k, v), "log_linear.step: state must be a LogLinearState, got None"),
        (lambda q, k, v, u: stepped(fresh()._replace(states=None)), "state.states must be an array .* got NoneType"),
        (lambda q, k, v, u: stepped(fresh()._replace(position=jnp.zeros(2))), "state.position must be integers, got float32"),
        (lambda q, k, v, u: stepped(q=q[:1, 0]), r"log_linear.step: k has shape \(2, 2, 4\), must be \[batch=1, heads=2"),
        (lambda q, k, v, u: stepped(fresh()._replace(key_sums=u)), r"state.key_sums has shape \(2, 9, 2, 4\), must be \[batch=2"),
        (lambda q, k, v, u: stepped(log_linear.init_state(1, HEADS, KEY, VALUE, 9)), r"state.states has shape \(1, 2, 5, 3, 4\)"),
        (lambda q, k, v, u: stepped(v=v[:, 0, :1]), r"v has shape \(2, 1, 3\), must be \[batch=2, heads=2, value_dim\]"),
        (lambda q, k, v, u: stepped(weights=None, connector=u), r"connector has shape .*must be \[batch=2, heads=2, key_dim=4\]"),
        (lambda q, k, v, u: stepped(weights=jnp.ones((2, 2, 4))), r"weights has shape .* must be \[2, 2, 5\] or more levels"),
        (lambda q, k, v, u: extended(k=k[:, :8]), r"log_linear.extend: k has shape \(2, 8, 2, 4\), must be \[batch=2, time=9"),
        (lambda q, k, v, u: extended(q=q[..., :3], k=k[..., :3]), r"log_linear.extend: state.states has .*key_dim=3"),
        (lambda q, k, v, u: log_linear.init_state(-1, 2, 4, 4, 9), "log_linear.init_state: batch_size .* ≥ 1, got -1"),
        (lambda q, k, v, u: log_linear.init_state(1, 2, 4, 4, 0), "log_linear.init_state: max_length .* ≥ 1, got 0"),
        (lambda q, k, v, u: log_linear.level_of(1.5, 2), "level_of: t must be integers, got float"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, words):
    q, k, v, _, _, u = small()
    with pytest.raises((TypeError, ValueError), match=words) as error:
        call(q, k, v, u)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("plus_plus", [False, True])
def test_packed_documents_are_alone(plus_plus, x64):
    """Also where an id comes back, and where lengths are powers of two and not."""
    lengths = np.array([[5, 13, 1, 19], [8, 16, 13, 1]])
    ids = jnp.asarray([np.repeat([3, 1, 3, 0], row) for row in lengths])
    q, k, v, weights, decay, u = inputs(38)

    def run(segment_ids, q, k, v, weights, decay, u):
        if plus_plus:
            weights = log_linear.segment_weights(u, k, segment_ids)
        return log_linear.attention(q, k, v, weights, decay, segment_ids)

    packed = jax.jit(run)(ids, q, k, v, weights, decay, u)
    whole = jax.jit(functools.partial(run, None))
    for row in range(BATCH):
        for start, length in zip(np.cumsum(lengths[row]) - lengths[row], lengths[row]):
            alone = [jnp.roll(x, -start, axis=1) for x in (q, k, v, weights, decay, u)]
            close(packed[row, start : start + length], whole(*alone)[row, :length], 1e-11)


# The same pieces of given weights; shorter ones are in tests/nn/test_baselines.py.
@pytest.mark.parametrize("plus_plus", some_slow([False, True], [False]))
def test_pieces_of_any_length_are_the_whole(plus_plus, x64):
    """Pieces shorter and longer than what is computed at once, that begin anywhere; values, state and gradients."""
    time = 140
    q, k, v, weights, decay, u = inputs(time)
    empty = jax.tree.map(
        lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x,
        log_linear.init_state(BATCH, HEADS, KEY, VALUE, time),
    )

    def stream(cuts, q, k, v, weights, decay, u):
        state, ys = empty, []
        for start, stop in itertools.pairwise(cuts):
            piece = [x[:, start:stop] for x in (q, k, v, weights, decay, u)]
            chosen = {"connector": piece[5]} if plus_plus else {"weights": piece[3]}
            y, state = log_linear.extend(state, *piece[:3], retention=piece[4], **chosen)
            ys.append(y)
        return jnp.concatenate(ys, axis=1), state

    def whole(q, k, v, weights, decay, u):
        if plus_plus:
            weights = log_linear.segment_weights(u, k)
        return log_linear.attention(q, k, v, weights, decay)

    args = (q, k, v, weights, decay, u)
    want = jax.jit(whole)(*args)
    states = []
    for each in ([0, 3, 4, 37, 140], [0, 140]):
        y, state = jax.jit(lambda *args, each=each: stream(each, *args))(*args)
        close(y, want, 1e-11)
        states.append(state)
    jax.tree.map(lambda a, b: close(a, b, 1e-11), *states)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(want.shape))
    gradient = lambda f: jax.jit(jax.grad(lambda args: jnp.sum(cotangent * f(*args))))(args)
    for a, b in zip(gradient(lambda *args: stream([0, 37, 140], *args)[0]), gradient(whole)):
        if np.abs(b).max() > 0:
            close(a, b, 1e-10)
