"""Softmax attention whose tokens are divided over devices: each device has the queries of its part of the sequence.

Without a window the keys and values go around all devices (`ring_attention`). With a window a device gets those of the window
before its part from its neighbours. Either way its memory does not grow with the sequence.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree, Shaped

from atlasjax.memory import Partition
from atlasjax.mixers.ring_attention import ring_attention


class Tokens(NamedTuple):
    """The arrays of one call, with one key for each query.

    Attributes:
      q, rotated: queries before and after rotation, [batch, time, heads, key_dim]. Persistent keys are read with the former.
      k: rotated keys, [batch, time, kv_heads, key_dim]. kv_heads divides heads.
      v: values, [batch, time, kv_heads, value_dim].
      position: of a token in its segment, [batch, time].
      segment: each token's segment index in the row, [batch, time], which never decreases. None for one segment.
    """

    q: Float[Array, "batch time heads key_dim"]
    rotated: Float[Array, "batch time heads key_dim"]
    k: Float[Array, "batch time kv_heads key_dim"]
    v: Float[Array, "batch time kv_heads value_dim"]
    position: Int[Array, "batch time"]
    segment: Int[Array, "batch time"] | None


def divided(
    run: Callable[..., Float[Array, "batch time heads value_dim"]],
    partition: Partition,
    tokens: Tokens,
    window: int | None,
    persistent: PyTree | None,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention of whole sequences.

    Args:
      run: `mixers.attention_blocks.in_blocks`, for the queries of one device and a window.
      partition: the mesh, and its axes that divide batch, kv_heads and time; `time` is not empty. The number of tokens need not be
        divisible.
      tokens: the arrays.
      window, persistent: as for `run`.

    Raises:
      ValueError: the batch or kv_heads are not divisible by the size of their axes.
    """
    partition.check(tokens.q.shape[0], tokens.k.shape[2])
    axes, time = partition.time, tokens.q.shape[1]
    devices = math.prod(partition.mesh.shape[axis] for axis in axes)
    multiple = 2 * devices if window is None else devices
    tokens = _padded(tokens, -time % multiple)

    def part(tokens: Tokens, persistent: PyTree | None) -> jax.Array:
        if window is None:
            return _over_all(axes, tokens, persistent)
        return _over_window(run, axes, tokens, min(window, time), persistent)

    batch, heads = partition.batch or None, partition.heads or None
    by_head, ids = PartitionSpec(batch, axes, heads), PartitionSpec(batch, axes)
    specs = (
        jax.tree.map(lambda x: ids if x.ndim == 2 else by_head, tokens),
        jax.tree.map(lambda _: PartitionSpec(None, heads), persistent),
    )
    mapped = jax.shard_map(part, mesh=partition.mesh, in_specs=specs, out_specs=by_head, check_vma=False)
    return mapped(tokens, persistent)[:, :time]


def _padded(tokens: Tokens, missing: int) -> Tokens:
    """The tokens, with others after them that no token sees."""
    pad = lambda x, fill=0: jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    padded: Tokens = jax.tree.map(pad, tokens)
    return padded._replace(position=pad(tokens.position, -1))


def _over_all(axes: tuple[str, ...], tokens: Tokens, persistent: PyTree | None) -> jax.Array:
    """The part of one device, over all tokens before it."""
    q, rotated, k, v, _, segment = tokens
    y, log_sum = ring_attention(axes, rotated, k, v, segment)
    if persistent is not None:
        y = _with_persistent(q, y, log_sum, persistent.keys.astype(k.dtype), persistent.values.astype(v.dtype))
    return y.astype(v.dtype)


def _with_persistent(q: jax.Array, y: jax.Array, log_sum: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """One softmax over the tokens, of which y and log_sum are known (`ring_attention`), and the keys [persistent, kv_heads, …]."""
    (batch, time), dim = q.shape[:2], q.shape[-1]
    grouped = lambda x: x.reshape(batch, time, keys.shape[1], -1, *x.shape[3:])
    logits = jnp.einsum("btkgd,pkd->btkgp", grouped(q), keys, preferred_element_type=jnp.float32) * dim**-0.5
    weights = jax.nn.softmax(jnp.concatenate([grouped(log_sum)[..., None], logits], axis=-1), axis=-1)
    of_tokens, weights = weights[..., :1], weights[..., 1:].astype(values.dtype)
    read = jnp.einsum("btkgp,pkv->btkgv", weights, values, preferred_element_type=jnp.float32)
    return (of_tokens * grouped(y) + read).reshape(y.shape)


def _over_window(
    run: Callable[..., jax.Array], axes: tuple[str, ...], tokens: Tokens, window: int, persistent: PyTree | None
) -> jax.Array:
    """The part of one device, over the window of each token."""
    q, rotated, k, v, position, segment = tokens

    def keys(x: jax.Array, fill: int) -> jax.Array:
        return jnp.concatenate([tokens_before(x, window, axes, fill), x], axis=1)

    k_segment = None if segment is None else keys(segment, -1)
    return run(
        q, rotated, keys(k, 0), keys(v, 0), position, keys(position, -1), segment, k_segment, window, persistent
    )  # fmt: skip


def tokens_before(
    x: Shaped[Array, "batch time ..."], size: int, axes: tuple[str, ...], fill: int
) -> Shaped[Array, "batch size ..."]:
    """The `size` tokens before this device's part, inside a `shard_map` that divides the tokens over `axes`.

    Args:
      x: the tokens of this device, [batch, time, …].
      size: ≥ 1; may be larger than time.
      axes: mesh axes; their devices, in order, have the parts of the sequence in order.
      fill: value before the first token of the sequence.

    Returns:
      [batch, size, …].
    """
    me, devices, time = jax.lax.axis_index(axes), jax.lax.axis_size(axes), x.shape[1]
    pieces = []
    for hop in range(-(-size // time), 0, -1):
        piece = x[:, max(0, hop * time - size) :]
        if hop >= devices:
            pieces.append(jnp.full_like(piece, fill))
            continue
        sent = jax.lax.ppermute(piece, axes, [(i, i + hop) for i in range(devices - hop)])
        pieces.append(jnp.where(me >= hop, sent, jnp.asarray(fill, x.dtype)))
    return jnp.concatenate(pieces, axis=1)
