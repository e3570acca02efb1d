"""Attention against its definition with an explicit mask: values, gradients, streams, segments, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.memory import Partition
from atlasjax.mixers import attention as A
from atlasjax.mixers.rotary import rotate
from tests.comparisons import close
from tests.marks import if_slow, some_slow
from tests.streams import check_rows_apart, streamed

BATCH, HEADS, KEY, VALUE, THETA = 2, 2, 4, 6, 100.0


pytestmark = pytest.mark.usefixtures("compile_fast")


def arrays(time, persistent=0, seed=0):
    shapes = {"q": (BATCH, time, HEADS, KEY), "k": (BATCH, time, HEADS, KEY), "v": (BATCH, time, HEADS, VALUE)}
    keys = jax.random.split(jax.random.key(seed), 5)
    x = {name: 2 * jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys)}
    if persistent:
        x["persistent"] = A.Persistent(
            jax.random.normal(keys[3], (persistent, HEADS, KEY)), jax.random.normal(keys[4], (persistent, HEADS, VALUE))
        )
    return x


def definition(q, k, v, persistent=None, window=None, segments=None):
    """The whole matrix of logits, one token and head at a time in words: rotate, mask, softmax."""
    batch, time = q.shape[:2]
    segments = np.zeros((batch, time), int) if segments is None else segments
    first = np.array([[np.flatnonzero(row == row[t])[0] for t in range(time)] for row in segments])
    position = jnp.asarray(np.arange(time) - first)
    t, s = np.arange(time)[:, None], np.arange(time)[None]
    visible = (s <= t) & (s > t - (time if window is None else window))
    visible = visible & (segments[:, :, None] == segments[:, None])
    logits = jnp.einsum("bthd,bshd->bhts", rotate(q, position, THETA), rotate(k, position, THETA))
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    values = v
    if persistent is not None:
        logits = jnp.concatenate([jnp.einsum("bthd,phd->bhtp", q, persistent.keys), logits], axis=-1)
        values = jnp.concatenate([jnp.tile(persistent.values, (batch, 1, 1, 1)), v], axis=1)
    return jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(logits / KEY**0.5, axis=-1), values)


@pytest.mark.parametrize("window", some_slow([None, 1, 5, 13, 100], [1, 5, 100]))
def test_tokens_divided_over_devices(window):
    """Four parts of 6 tokens: windows within a part, over two and three of them, and longer than the sequence."""
    sizes = {"data": 2, "sequence": 4}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = arrays(24, persistent=2)
    segments = jnp.asarray([[0] * 4 + [1] * 9 + [2] * 11, [0] * 12 + [1] * 12])

    def run(x, ids, **options):
        y = A.attention(**x, rope_theta=THETA, window=window, segment_ids=ids, **options)
        return jnp.sum(jnp.sin(y)), y

    graded = jax.jit(jax.value_and_grad(run, has_aux=True), static_argnames=("partition",))
    for ids in (segments, None):
        expected = graded(x, ids)
        found = graded(x, ids, partition=Partition(mesh, ("data",), time=("sequence",)))
        jax.tree.map(close, found, expected)


# One block, several, and a last one that is not full; windows of one token, odd ones, longer than a block, than the sequence. The
# blocks of 1,300 tokens are in four parts of one and two.
CASES = [
    (7, None, 0), (300, None, 3), (7, 1, 0), (7, 3, 2), (7, 50, 0), (64, 5, 0), (150, 5, 1), (150, 64, 0), (150, 97, 0),
    (600, 280, 0), (600, 601, 0), (1300, None, 1),
]  # fmt: skip


# A window of 64 or 5, or one longer than the sequence, takes the paths of those that are left.
LIKE_ANOTHER = [(7, None, 0), (7, 50, 0), (64, 5, 0), (150, 5, 1), (150, 64, 0), (600, 601, 0)]


@pytest.mark.parametrize(
    ("time", "window", "persistent"), [if_slow(*case) if case in LIKE_ANOTHER else case for case in CASES]
)
def test_values_and_gradients(time, window, persistent):
    x = arrays(time, persistent)
    weights = jax.random.normal(jax.random.key(9), (BATCH, time, HEADS, VALUE))
    run = lambda f, **options: jax.jit(
        jax.value_and_grad(lambda x: (lambda y: (jnp.sum(weights * y), y))(f(**x, **options)), has_aux=True)
    )(x)
    (_, expected), expected_gradients = run(definition, window=window)
    (_, y), gradients = run(A.attention, window=window, rope_theta=THETA)
    close(y, expected)
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    close(flat(gradients), flat(expected_gradients), 2e-5)


def test_without_rotation_it_is_jaxs_own():
    x = arrays(20)
    flat = {**x, "v": x["v"][..., :KEY]}
    at_one_place = jnp.zeros((BATCH, 20), jnp.int32)
    np.testing.assert_array_equal(rotate(x["q"], at_one_place), x["q"])
    rotated = {**flat, **{n: rotate(flat[n], jnp.tile(jnp.arange(20), (BATCH, 1)), THETA) for n in "qk"}}
    for window in (None, 6):
        local = None if window is None else (window - 1, 0)
        expected = jax.nn.dot_product_attention(*rotated.values(), is_causal=True, local_window_size=local)
        close(A.attention(**flat, window=window, rope_theta=THETA), expected)


@pytest.mark.parametrize("window", [None, 3, 70])
def test_segments(window):
    ids = np.repeat([[5, 0, 5, 2], [1, 2, 3, 4]], [30, 1, 70, 49], axis=1)  # an id may return: still another segment
    x = arrays(150, 2)
    y = jax.jit(lambda x: A.attention(**x, window=window, rope_theta=THETA, segment_ids=jnp.asarray(ids)))(x)
    numbered = np.repeat([[0, 1, 2, 3]] * 2, [30, 1, 70, 49], axis=1)
    close(y, definition(**x, window=window, segments=numbered))
    alone = {name: x[name][:, 31:101] for name in "qkv"}
    close(y[:, 31:101], A.attention(**alone, persistent=x["persistent"], window=window, rope_theta=THETA))


def test_segments_over_several_parts():
    lengths = [300, 1, 499, 240]
    x, numbered = arrays(sum(lengths)), np.repeat([[0, 1, 2, 3]] * 2, lengths, axis=1)
    run = jax.jit(lambda x: A.attention(**x, rope_theta=THETA, segment_ids=jnp.asarray(numbered)))
    close(run(x), definition(**x, segments=numbered))


@functools.partial(jax.jit, static_argnames="window")
def parallel(x, window):
    return A.attention(**x, window=window, rope_theta=THETA)


@jax.jit
def extend(x, cache, persistent=None):
    return A.extend(**x, cache=cache, rope_theta=THETA, persistent=persistent)


def init_cache(window, length):
    sizes = (HEADS, KEY, VALUE, jnp.float32)
    return A.init_cache(BATCH, length, *sizes) if window is None else A.init_window(BATCH, window, *sizes)


def stream(x, cache, cuts):
    of_tokens = {name: x[name] for name in "qkv"}
    return streamed(functools.partial(extend, persistent=x.get("persistent")), of_tokens, cache, cuts)


@pytest.mark.parametrize(("window", "persistent"), [(None, 2), if_slow(1, 0), (4, 2), if_slow(5, 0), (40, 0)])
def test_streamed_is_parallel(window, persistent):
    x = arrays(17, persistent)
    expected = parallel(x, window)
    empty = init_cache(window, 17)
    caches = []
    for cuts in (range(18), [0, 17], [0, 2, 3, 9, 10, 17]):
        y, cache = stream(x, empty, cuts)
        close(y, expected)
        caches.append(cache)
    for cache in caches[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), cache, caches[0])


@pytest.mark.parametrize("window", [None, 5])
def test_heads_share_keys_and_values_and_rotate_in_part(window):
    """Six heads of queries on two of keys, of which two channels are rotated: as if the keys of a group were repeated."""
    x, time = arrays(17, 2), 17
    x["q"] = 2 * jax.random.normal(jax.random.key(5), (BATCH, time, 3 * HEADS, KEY))
    weights = jax.random.normal(jax.random.key(6), (BATCH, time, 3 * HEADS, VALUE))

    def repeated(q, k, v, persistent):
        position = jnp.tile(jnp.arange(time), (BATCH, 1))
        turn = lambda a: jnp.concatenate([rotate(a[..., :2], position, THETA), a[..., 2:]], axis=-1)
        again = lambda a: jnp.repeat(a, 3, axis=-2)
        keys = jnp.arange(time)[None] <= jnp.arange(time)[:, None]
        if window is not None:
            keys &= jnp.arange(time)[None] > jnp.arange(time)[:, None] - window
        logits = jnp.einsum("bthd,bshd->bhts", turn(q), turn(again(k)))
        logits = jnp.where(keys, logits, -jnp.inf)
        logits = jnp.concatenate([jnp.einsum("bthd,phd->bhtp", q, again(persistent.keys)), logits], axis=-1)
        values = jnp.concatenate([jnp.tile(again(persistent.values), (BATCH, 1, 1, 1)), again(v)], axis=1)
        return jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(logits / KEY**0.5, axis=-1), values)

    options = {"rope_theta": THETA, "rope_dim": 2}
    run = lambda f, **options: jax.value_and_grad(
        lambda x: (lambda y: (jnp.sum(weights * y), y))(f(**x, **options)), has_aux=True
    )(x)

    @jax.jit
    def everything(x, cache):
        pieces = []
        for start, stop in ((0, 6), (6, 7), (7, time)):
            piece = (x[name][:, start:stop] for name in "qkv")
            y, cache = A.extend(*piece, cache, persistent=x["persistent"], **options)
            pieces.append(y)
        return run(repeated), run(A.attention, window=window, **options), jnp.concatenate(pieces, axis=1)

    ((_, expected), expected_gradients), ((_, y), gradients), pieces = everything(x, init_cache(window, time))
    close(y, expected)
    close(pieces, expected)
    jax.tree.map(lambda a, b: close(a, b, 2e-5), gradients, expected_gradients)


def test_a_long_piece_of_a_stream_goes_through_blocks():
    x = arrays(400)
    for window in (None, 30):
        empty = init_cache(window, 400)
        y, _ = stream(x, empty, [0, 61, 400])
        close(y, parallel(x, window))


def test_rows_of_a_stream_may_have_read_different_numbers_of_tokens():
    x = arrays(12)
    for window in (None, 4):
        check_rows_apart(extend, x, parallel(x, window), init_cache(window, 12), [3, 7], [[0, 1, 5]])


def test_a_long_stream_sees_distances_exactly():
    """What a window gives does not depend on how much was read before it, after three million tokens either."""
    x = arrays(12)
    empty = init_cache(4, 12)
    y, _ = stream(x, empty, [0, 1, 12])
    late, cache = stream(x, empty._replace(position=empty.position + 3_000_001), [0, 1, 12])
    close(late[:, 4:], y[:, 4:], 2e-6)
    assert np.array_equal(cache.position, [3_000_013] * BATCH)


def test_tokens_beyond_a_full_cache_are_nan():
    x = arrays(9)
    empty = init_cache(None, 6)
    for cuts in ([0, 9], [0, 4, 9], range(10)):
        y, _ = stream(x, empty, cuts)
        close(y[:, :6], parallel(x, None)[:, :6])
        assert np.all(np.isnan(y[:, 6:]))


def test_bfloat16_has_a_float32_softmax():
    x = {name: value.astype(jnp.bfloat16) for name, value in arrays(300).items()}
    for window in (None, 20):
        y = parallel(x, window)
        assert y.dtype == jnp.bfloat16
        exact = definition(**{name: value.astype(jnp.float32) for name, value in x.items()}, window=window)
        error = np.asarray(y, np.float32) - np.asarray(exact)
        assert np.sqrt(np.mean(error**2)) < 0.01 * np.asarray(exact).std()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": jnp.zeros((BATCH, 6, HEADS, KEY))}, r"k has shape \(2, 6, 2, 4\), must be .*time=5"),
        ({"q": jnp.zeros((BATCH, 5, HEADS, 3)), "k": jnp.zeros((BATCH, 5, HEADS, 3))}, "key_dim is 3, must be even"),
        ({"q": jnp.zeros((BATCH, 5, 3, KEY))}, "k has 2 heads, which should divide the 3 of q"),
        ({"rope_dim": 3}, "rope_dim is 3, must be even and at most key_dim=4"),
        ({"rope_dim": 6}, "rope_dim is 6, must be even and at most key_dim=4"),
        ({"window": 0}, "window must be an integer ≥ 1 or None, got 0"),
        ({"segment_ids": jnp.zeros((BATCH, 4), jnp.int32)}, r"segment_ids has shape \(2, 4\), must be \[2, 5\]"),
        (
            {"persistent": A.Persistent(jnp.zeros((1, 1, KEY)), jnp.zeros((1, HEADS, VALUE)))},
            "persistent.keys has shape",
        ),
    ],
)
def test_bad_input_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        A.attention(**(arrays(5) | changes))


def test_no_square_array_is_formed():
    """Temporary bytes of the compiled programs."""

    jax.config.update("jax_disable_most_optimizations", False)  # until the end of the module

    def temporary(time, window):
        shape = lambda size: jax.ShapeDtypeStruct((1, time, 1, size), jnp.float32)
        run = lambda q, k, v: A.attention(q, k, v, window=window)
        return jax.jit(run).lower(shape(8), shape(8), shape(8)).compile().memory_analysis().temp_size_in_bytes

    assert temporary(16384, 128) < 2.2 * temporary(8192, 128)
    assert temporary(16384, 128) < 16384 * 16384 * 4 / 100
    assert temporary(16384, None) < 16384 * 16384 * 4 / 10
