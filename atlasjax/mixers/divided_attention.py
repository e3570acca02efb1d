"""Softmax attention whose tokens are divided over devices: each device has the queries of its part of the sequence.

Without a window every device gathers the keys and values of the whole sequence. With a window it gets those of the window before
its part from its neighbours, so that its memory does not grow with the sequence.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree, Shaped

from atlasjax.memory import Partition


def divided(
    run: Callable[..., Float[Array, "batch time heads value_dim"]],
    partition: Partition,
    q: Float[Array, "batch time heads key_dim"],
    rotated: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time kv_heads key_dim"],
    v: Float[Array, "batch time kv_heads value_dim"],
    position: Int[Array, "batch time"],
    segment: Int[Array, "batch time"] | None,
    window: int | None,
    persistent: PyTree | None,
) -> Float[Array, "batch time heads value_dim"]:
    """Attention of whole sequences.

    Args:
      run: `mixers.attention._in_blocks`, for the queries of one device.
      partition: the mesh, and its axes that divide batch, kv_heads and time; `time` is not empty.
      q, rotated, k, v, position, segment: as for `run`, with one key for each query. [batch, time, …]
      window, persistent: as for `run`.
    """
    batch, axes, heads = partition.batch or None, partition.time, partition.heads or None
    past = None if window is None else min(window, q.shape[1])

    def part(
        q: jax.Array,
        rotated: jax.Array,
        k: jax.Array,
        v: jax.Array,
        position: jax.Array,
        segment: jax.Array | None,
        persistent: PyTree | None,
    ) -> jax.Array:
        def keys(x: jax.Array | None, fill: int) -> jax.Array | None:
            if x is None:
                return None
            if past is None:
                return jax.lax.all_gather(x, axes, axis=1, tiled=True)
            return jnp.concatenate([tokens_before(x, past, axes, fill), x], axis=1)

        return run(
            q,
            rotated,
            keys(k, 0),
            keys(v, 0),
            position,
            keys(position, -1),
            segment,
            keys(segment, -1),
            past,
            persistent,
        )

    tokens, ids = PartitionSpec(batch, axes, heads), PartitionSpec(batch, axes)
    specs = (
        *(tokens,) * 4,
        ids,
        None if segment is None else ids,
        jax.tree.map(lambda _: PartitionSpec(None, heads), persistent),
    )
    mapped = jax.shard_map(part, mesh=partition.mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return mapped(q, rotated, k, v, position, segment, persistent)


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
