"""Softmax over several sets of keys, against float64 in NumPy: few queries, which are read in one product, and many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.mixers import softmax_attention as S
from atlasjax.mixers.attention import Persistent, attention, extend, init_cache, init_window
from atlasjax.mixers.softmax_attention import Source, attention_of_layer, softmax_attention, together
from tests.comparisons import close

BATCH, SIZE, KEY, VALUE = 2, 11, 4, 6

pytestmark = pytest.mark.usefixtures("compile_fast")


def sources(time, heads, kv_heads, dtype=jnp.float32):
    """Keys with and without a batch axis, the first partly hidden."""
    rng = np.random.default_rng(time + heads)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    q = normal(BATCH, time, heads, KEY)
    visible = jnp.asarray(rng.random((BATCH, time, SIZE)) < 0.6)
    return [
        Source(q, normal(BATCH, SIZE, kv_heads, KEY), normal(BATCH, SIZE, kv_heads, VALUE), visible),
        Source(2 * q, normal(3, kv_heads, KEY), normal(3, kv_heads, VALUE)),
    ]


def definition(given):
    """One query at a time: the logits of all keys, their softmax, the mean of the values."""
    batch, time, heads, _ = given[0].q.shape
    y = np.zeros((batch, time, heads, given[0].v.shape[-1]))
    for b, t, h in np.ndindex(batch, time, heads):
        logits, values = [], []
        for q, k, v, visible in given:
            k, v = (np.asarray(x[b] if x.ndim == 4 else x, np.float64) for x in (k, v))
            head = h // (heads // k.shape[1])
            logit = k[:, head] @ np.asarray(q[b, t, h], np.float64) / np.sqrt(q.shape[-1])
            logits.append(logit if visible is None else np.where(visible[b, t], logit, -np.inf))
            values.append(v[:, head])
        weights = np.exp(np.concatenate(logits) - max(map(np.max, logits)))
        y[b, t, h] = weights @ np.concatenate(values) / weights.sum()
    return y


@pytest.mark.parametrize(("time", "heads", "kv_heads"), [(1, 4, 4), (3, 6, 2), (2, 4, 1), (20, 4, 4), (20, 6, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)])
def test_the_definition(time, heads, kv_heads, dtype, tolerance):
    given = sources(time, heads, kv_heads, dtype)
    y, divided = (jax.jit(lambda *x, split=split: softmax_attention(*x, split_heads=split))(*given) for split in (0, 1))
    expected = definition(given)
    for got in (y, divided):
        assert got.dtype == dtype
        close(got, expected, tolerance)


def test_gradients_of_few_queries_are_those_of_many():
    given = sources(3, 6, 2)
    weights = jax.random.normal(jax.random.key(0), (BATCH, 3, 6, VALUE))
    numbers = [source[:3] for source in given]

    def loss(numbers, split):
        return jnp.sum(
            weights
            * softmax_attention(
                *(Source(*x, s.visible) for x, s in zip(numbers, given, strict=True)), split_heads=split
            )
        )

    few, many = (jax.jit(jax.grad(loss), static_argnums=1)(numbers, split) for split in (False, True))
    close(few, many, 2e-6)


@pytest.mark.parametrize("tokens", [4, 5, 64])  # of a piece: with a rest of 11 tokens, without one, and all tokens
@pytest.mark.parametrize(("time", "heads", "kv_heads"), [(1, 4, 4), (3, 6, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)])
def test_pieces_of_a_layer(monkeypatch, tokens, time, heads, kv_heads, dtype, tolerance):
    """What lies in the cache of all layers is the source that it would be alone. Values and gradients."""
    monkeypatch.setattr(S, "_SMALLEST_PIECE", 1)
    monkeypatch.setattr(S, "_PIECE_BYTES", tokens * kv_heads * KEY * jnp.dtype(dtype).itemsize)
    one, other = sources(time, heads, kv_heads, dtype)

    def of_layer(q, k, v, other):
        layers = lambda x: jnp.pad(together(x)[None], ((1, 1), (0, 0), (0, 0), (0, 0)), constant_values=jnp.nan)
        return attention_of_layer(q, layers(k), layers(v), jnp.int32(1), one.visible, other)

    alone = lambda q, k, v, other: softmax_attention(Source(q, k, v, one.visible), other)
    weights = jax.random.normal(jax.random.key(0), (BATCH, time, heads, VALUE))

    def graded(function):
        loss = lambda *args: jnp.sum(weights * function(*args).astype(jnp.float32))
        return function(*one[:3], other), jax.grad(loss, argnums=(0, 1, 2, 3))(*one[:3], other)

    found, expected = jax.jit(lambda: graded(of_layer))(), jax.jit(lambda: graded(alone))()
    close(found, expected, tolerance)


def test_few_queries_read_the_cache_as_it_lies():
    """No copy of a cache in another layout: for one token the products run over arrays of the cache's own shape."""
    cache = init_cache(BATCH, 64, 4, KEY, VALUE, jnp.float32)
    new = [jnp.ones((BATCH, 1, 4, size)) for size in (KEY, KEY, VALUE)]
    program = jax.jit(lambda *new: extend(*new, cache)[0]).lower(*new).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) == 2
    for line, size in zip(products, (KEY, VALUE), strict=True):
        assert f"tensor<{BATCH}x64x{4 * size}xf32>" in line


def test_heads_over_devices_stay_with_their_devices():
    """Where an axis of the mesh splits the heads, a token needs no communication."""
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from atlasjax.memory import Partition

    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((BATCH, 9, 4, size)), jnp.float32) for size in (KEY, KEY, VALUE))
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    by_head = lambda x: place(x, "data", None, "tensor")
    cache = init_cache(BATCH, 9, 4, KEY, VALUE, jnp.float32)
    cache = cache._replace(
        keys=by_head(cache.keys), values=by_head(cache.values), position=place(cache.position, "data")
    )
    partition = Partition(mesh, batch=("data",), heads=("tensor",))
    run = jax.jit(lambda q, k, v, cache: extend(q, k, v, cache, partition=partition))
    token = lambda t: [by_head(x[:, t : t + 1]) for x in (q, k, v)]
    program = run.lower(*token(0), cache).compile().as_text()
    assert not any(name in program for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))
    pieces = []
    for t in range(9):
        y, cache = run(*token(t), cache)
        pieces.append(y)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), attention(q, k, v), rtol=0, atol=1e-6)


def cached(heads=2, layers=(), **changed):
    cache = init_cache(BATCH, 8, heads, KEY, VALUE, jnp.float32)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*layers, *x.shape)), cache)._replace(**changed)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: extend(q, k, v, None), "attention.extend: cache must be a KVCache or a WindowCache, got NoneType"),
        (lambda q, k, v: extend(q[:1], k[:1], v[:1], cached()), r"cache.keys has shape \(2, 8, 8\), must be \[batch=1, size, "),
        (lambda q, k, v: extend(q, k, v, cached(3)), r"cache.keys has shape \(2, 8, 12\), must be .*kv_heads·key_dim=8\]"),
        (lambda q, k, v: extend(q, k, v, cached(values=None)), r"cache.values must be an array \[.*got NoneType"),
        (lambda q, k, v: extend(q, k, v, cached(position=jnp.zeros(BATCH))), "cache.position must be integers, got float32"),
        (lambda q, k, v: extend(q, k, v, cached(), layer=0), r"cache.keys has shape .*must be \[layers, batch=2"),
        (lambda q, k, v: extend(q, k, v, cached(layers=(3,))), r"cache.keys has shape .*must be \[batch=2, size"),
        (lambda q, k, v: extend(q, k, v, cached(layers=(3,)), layer=3), r"layer has the value 3, must be in \[0, 2\]"),
        (lambda q, k, v: extend(q, k, v, cached(layers=(3,)), layer=1.5), "layer must be an integer or None, got 1.5"),
        (lambda q, k, v: attention(q, k, v, persistent=(k[0], v[0])), "attention: persistent must be a Persistent or None"),
        (lambda q, k, v: attention(q, k, v, persistent=Persistent(k[0], None)), "persistent.values must be an array .* NoneType"),
        (lambda q, k, v: attention(q, k, v, partition="data"), "attention: partition must be a Partition or None, got 'data'"),
        (lambda q, k, v: attention(q, k, v, rope_theta=0), "attention: rope_theta must be a number > 0 or None, got 0"),
        (lambda q, k, v: attention(q, k, v, fused=1), "attention: fused must be True or False, got 1"),
        (lambda q, k, v: attention(q, k, v, segment_ids=[[0]]), "attention: segment_ids must be an array"),
        (lambda q, k, v: init_cache(2, 0, 2, 4, 6, "float32"), "attention.init_cache: max_length must be an integer ≥ 1, got 0"),
        (lambda q, k, v: init_cache(-1, 8, 2, 4, 6, "float32"), "attention.init_cache: batch_size must be .* got -1"),
        (lambda q, k, v: init_window(2, 0, 2, 4, 6, "float32"), "attention.init_window: window must be an integer ≥ 1, got 0"),
        (lambda q, k, v: init_window(2, 8, 2, 4, 6, "x"), "attention.init_window: dtype must be one of floating point, got 'x'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, words):
    arrays = (jnp.ones((BATCH, 3, 2, size)) for size in (KEY, KEY, VALUE))
    with pytest.raises((TypeError, ValueError), match=words) as error:
        call(*arrays)
    assert len(str(error.value).splitlines()) == 1
