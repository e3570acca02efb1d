"""Causal softmax attention over all tokens, whose keys and values go around the devices that divide the tokens (ring attention).

    y_t = Σ_s exp(q_t · k_s / √key_dim − l_t) v_s        l_t = log Σ_s exp(q_t · k_s / √key_dim)        over s ≤ t of t's segment

(Liu et al. 2023.) Each device keeps the queries of its part of the sequence. The parts of keys and values pass every device in
turn, and each device adds what its queries read of them, with the largest logit and the sum so far. The backward pass goes around
once more: it computes the logits again, and the gradients of a part of keys and values travel with it. So a device holds its own
part and the one that it reads, with the next one that arrives meanwhile, and the logits of one block of queries and keys.

Since a token sees only what is before it, devices with consecutive tokens would wait for the last one. So tokens are dealt out anew
inside the attention (`deal`): with n devices and 2n pieces of the sequence, device i has the pieces i and 2n − 1 − i, and every
device has as much to read as the others.

All functions run inside a `shard_map` that divides the tokens over `axes`; their devices, in order, have the parts in order.
"""

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

Tree = TypeVar("Tree")

_QUERIES, _KEYS = 256, 1024  # the largest blocks
_MASKED = -1e30
_NEVER = np.iinfo(np.int32).max  # the place of a key of padding, which no token sees


def ring_attention(
    axes: tuple[str, ...],
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time kv_heads key_dim"],
    v: Float[Array, "batch time kv_heads value_dim"],
    segment: Int[Array, "batch time"] | None,
) -> tuple[Float[Array, "batch time heads value_dim"], Float[Array, "batch time heads"]]:
    """The queries of this device over all tokens before them.

    Args:
      axes: mesh axes that divide the tokens.
      q: rotated queries of this device, an even number of tokens. kv_heads divides heads.
      k, v: rotated keys, and values.
      segment: each token's segment index in the row, which never decreases. None for one segment.

    Returns:
      y [batch, time, heads, value_dim] and l [batch, time, heads], float32.
    """
    batch, time, heads = q.shape[:3]
    grouped = q.reshape(batch, time, k.shape[2], -1, q.shape[-1])
    grouped, k, v, segment = jax.tree.map(lambda x: deal(x, axes), (grouped, k, v, segment))
    y, log_sum = (collect(x, axes) for x in _ring(axes, grouped, k, v, segment))
    return y.reshape(batch, time, heads, -1), log_sum.reshape(batch, time, heads)


def deal(x: Shaped[Array, "batch time ..."], axes: tuple[str, ...]) -> Shaped[Array, "batch time ..."]:
    """From consecutive tokens on each device to the pieces i and 2n − 1 − i on device i. `time` is even."""
    first, second = jnp.split(x, 2, axis=1)
    even = jax.lax.axis_index(axes) % 2 == 0
    to_first, to_second = _dealt(axes)
    a, b = jax.lax.ppermute(first, axes, to_first), jax.lax.ppermute(second, axes, to_second)
    return jnp.concatenate([jnp.where(even, a, b), jnp.where(even, b, a)], axis=1)


def collect(x: Shaped[Array, "batch time ..."], axes: tuple[str, ...]) -> Shaped[Array, "batch time ..."]:
    """The inverse of `deal`."""
    early, late = jnp.split(x, 2, axis=1)
    even = jax.lax.axis_index(axes) % 2 == 0
    a, b = jnp.where(even, early, late), jnp.where(even, late, early)
    back = [[(target, source) for source, target in pairs] for pairs in _dealt(axes)]
    return jnp.concatenate([jax.lax.ppermute(half, axes, pairs) for half, pairs in zip((a, b), back)], axis=1)


def _dealt(axes: tuple[str, ...]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(from, to) of the first and of the second halves of all parts, which are the even and the odd pieces."""
    devices = jax.lax.axis_size(axes)
    holder = lambda piece: min(piece, 2 * devices - 1 - piece)
    return tuple([(i, holder(2 * i + half)) for i in range(devices)] for half in (0, 1))  # type: ignore[return-value]


class _Tokens(NamedTuple):
    """Tokens in blocks, [blocks, …].

    place: in the sequence, [blocks, size]. segment: [blocks, batch, size]. arrays: [blocks, batch, size, …].
    """

    place: jax.Array
    segment: jax.Array | None
    arrays: tuple[jax.Array, ...]


class _Sums(NamedTuple):
    """The sums that queries have read so far.

    top, total: the largest logit, and the sum of weights, [batch, kv_heads, groups, time]. values: the sum of weighted values,
    [batch, kv_heads, groups, time, value_dim].
    """

    top: jax.Array
    total: jax.Array
    values: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    axes: tuple[str, ...], q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`ring_attention` of dealt tokens, with queries [batch, time, kv_heads, groups, key_dim]."""
    return _forward(axes, q, k, v, segment)[0]


def _forward(
    axes: tuple[str, ...], q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array | None
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    batch, time, kv_heads, groups, _ = q.shape
    place, q, segment = _bound(_places(time, axes), q, segment)
    queries = _blocks(_QUERIES, -1, place, segment, q)
    part = _blocks(_KEYS, _NEVER, place, segment, k, v)
    blocks, size = queries.place.shape
    empty = lambda fill, *dims: jnp.full((blocks, batch, kv_heads, groups, size, *dims), fill, jnp.float32)

    def turn(carry: tuple[_Tokens, _Sums], _: None) -> tuple[tuple[_Tokens, _Sums], None]:
        part, sums = carry
        # Sent on before it is read, so that the next one can arrive meanwhile.
        return (_pass_on(part, axes), _read(queries, part, sums)), None

    start = (part, _Sums(empty(_MASKED), empty(0.0), empty(0.0, v.shape[-1])))
    (_, sums), _ = jax.lax.scan(turn, start, None, length=jax.lax.axis_size(axes))
    total = jnp.maximum(sums.total, 1.0)  # at least 1, but for queries of padding
    y, log_sum = sums.values / total[..., None], sums.top + jnp.log(total)
    join = lambda x: jnp.moveaxis(jnp.moveaxis(x, 0, 3).reshape(batch, kv_heads, groups, -1, *x.shape[5:]), 3, 1)[
        :, :time
    ]
    y, log_sum = join(y), join(log_sum)
    return (y, log_sum), (q, k, v, segment, y, log_sum)


def _backward(axes: tuple[str, ...], saved: tuple, cotangents: tuple[jax.Array, jax.Array]) -> tuple:
    q, k, v, segment, y, log_sum = saved
    dy, dlog_sum = cotangents
    time = q.shape[1]
    place, dy, segment = _bound(_places(time, axes), dy, segment)
    # ∂/∂logit = weight (dy · v − dy · y + dl)
    # One number per query, so that no device needs the weights of others for the softmax's derivative.
    offset = dlog_sum - jnp.sum(dy * y, axis=-1)
    queries = _blocks(_QUERIES, -1, place, segment, q, dy.astype(v.dtype), log_sum, offset)
    part = _blocks(_KEYS, _NEVER, place, segment, k, v)
    wide = lambda x: jnp.zeros(x.shape, jnp.float32)

    def turn(carry: tuple, _: None) -> tuple[tuple, None]:
        part, pulled, dq = carry
        following = _pass_on(part, axes)
        pulled, dq = _pull(queries, part, pulled, dq)
        return (following, _pass_on(pulled, axes), dq), None

    start = (part, jax.tree.map(wide, part.arrays), wide(queries.arrays[0]))
    (_, (dk, dv), dq), _ = jax.lax.scan(turn, start, None, length=jax.lax.axis_size(axes))
    join = lambda x, like: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :time].astype(like.dtype)
    return join(dq, q), join(dk, k), join(dv, v), None


_ring.defvjp(_forward, _backward)


def _read(queries: _Tokens, part: _Tokens, sums: _Sums) -> _Sums:
    """`sums` and what the queries read of a part."""

    def of_block(_: None, xs: tuple[_Tokens, _Sums]) -> tuple[None, _Sums]:
        block, sums = xs

        def add(sums: _Sums, keys: _Tokens) -> tuple[_Sums, None]:
            return jax.lax.cond(_may_see(block, keys), lambda: _add(block, keys, sums), lambda: sums), None

        return None, jax.lax.scan(add, sums, part)[0]

    return jax.lax.scan(of_block, None, (queries, sums))[1]


def _add(block: _Tokens, keys: _Tokens, sums: _Sums) -> _Sums:
    (q,), (k, v) = block.arrays, keys.arrays
    logits, visible = _logits(q, k), _visible(block, keys)
    top = jnp.maximum(sums.top, jnp.max(jnp.where(visible, logits, _MASKED), axis=-1))
    weights = jnp.where(visible, jnp.exp(logits - top[..., None]), 0.0)
    # The earlier sums are brought to the new largest logit.
    shrink = jnp.exp(sums.top - top)
    read = jnp.einsum("bkgts,bskv->bkgtv", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _Sums(top, sums.total * shrink + jnp.sum(weights, axis=-1), sums.values * shrink[..., None] + read)


def _pull(
    queries: _Tokens, part: _Tokens, pulled: tuple[jax.Array, ...], dq: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The gradients of a part's keys and values, and of the queries, with what these queries add to them."""

    def of_block(pulled: tuple[jax.Array, ...], xs: tuple[_Tokens, jax.Array]) -> tuple:
        block, dq = xs

        def add(dq: jax.Array, xs: tuple[_Tokens, tuple[jax.Array, ...]]) -> tuple:
            keys, pulled = xs
            return jax.lax.cond(
                _may_see(block, keys), lambda: _add_gradients(block, keys, pulled, dq), lambda: (dq, pulled)
            )

        dq, pulled = jax.lax.scan(add, dq, (part, pulled))
        return pulled, dq

    return jax.lax.scan(of_block, pulled, (queries, dq))


def _add_gradients(
    block: _Tokens, keys: _Tokens, pulled: tuple[jax.Array, ...], dq: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    (q, dy, log_sum, offset), (k, v), (dk, dv) = block.arrays, keys.arrays, pulled
    by_head = lambda x: jnp.moveaxis(x, 1, 3)[..., None]  # [batch, time, kv_heads, groups] → […, time, 1]
    weights = jnp.where(_visible(block, keys), jnp.exp(_logits(q, k) - by_head(log_sum)), 0.0)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    slope = weights * (product("btkgv,bskv->bkgts", dy, v) + by_head(offset))
    slope = (slope * q.shape[-1] ** -0.5).astype(q.dtype)
    dq = dq + product("bkgts,bskd->btkgd", slope, k)
    dk = dk + product("bkgts,btkgd->bskd", slope, q)
    dv = dv + product("bkgts,btkgv->bskv", weights.astype(v.dtype), dy)
    return dq, (dk, dv)


def _logits(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5


def _visible(block: _Tokens, keys: _Tokens) -> jax.Array:
    """Whether a query sees a key, [batch or 1, 1, 1, queries, keys]."""
    seen = (keys.place <= block.place[:, None])[None]
    if block.segment is not None and keys.segment is not None:
        seen = seen & (block.segment[:, :, None] == keys.segment[:, None])
    return seen[:, None, None]


def _may_see(block: _Tokens, keys: _Tokens) -> jax.Array:
    """False only if no query of a block sees a key of the other, being in front of it or in later segments."""
    seen = jnp.min(keys.place) <= jnp.max(block.place)
    if block.segment is not None and keys.segment is not None:
        seen &= jnp.any(jnp.max(keys.segment, axis=1) >= jnp.min(block.segment, axis=1))
    return seen


def _bound(place: jax.Array, x: jax.Array, segment: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The arguments, of which all now depend on x.

    Otherwise the masks are the same for all layers, and JAX takes them out of a scan over layers: those of all blocks, at once.
    """
    return jax.lax.optimization_barrier((place, x, segment))


def _places(time: int, axes: tuple[str, ...]) -> jax.Array:
    """The places in the sequence of this device's dealt tokens, [time]."""
    me, last = jax.lax.axis_index(axes), 2 * jax.lax.axis_size(axes) - 1
    piece = jnp.arange(time // 2, dtype=jnp.int32)
    return jnp.concatenate([me * (time // 2) + piece, (last - me) * (time // 2) + piece])


def _blocks(largest: int, nowhere: int, place: jax.Array, segment: jax.Array | None, *arrays: jax.Array) -> _Tokens:
    """Tokens in as few blocks of at most `largest` as possible, with the place `nowhere` for padding."""
    time = place.shape[0]
    count = -(-time // largest)
    size = -(-time // count)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * size - time), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    place = jnp.pad(place, (0, count * size - time), constant_values=nowhere).reshape(count, size)
    return _Tokens(place, None if segment is None else cut(segment), tuple(map(cut, arrays)))


def _pass_on(tree: Tree, axes: tuple[str, ...]) -> Tree:
    """The arrays of the device before this one."""
    devices = jax.lax.axis_size(axes)
    around = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, around), tree)
