"""Products of rows that are sorted by group, each with its group's matrix: y_r = x_r W_{group(r)}.

`jax.lax.ragged_dot` is this product, and a kernel on TPUs. On CPUs and NVIDIA GPUs XLA makes it one dense product of all rows with
all groups, in which the rows of other groups are zeros: with E groups E times the FLOPs, and E copies of the rows (jax 0.10.2, read
in the compiled programs). There the rows are multiplied a tile at a time instead, with the matrices of the groups in it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax.memory.products import product, wide_dtype

_TILE = 128  # rows of a product: enough for a matrix unit, few enough that tiles of two groups are a small part


def grouped_product(
    x: Float[Array, "rows dim"], w: Float[Array, "groups dim out"], sizes: Int[Array, " groups"]
) -> Float[Array, "rows out"]:
    """The product of each row with the matrix of its group.

    Args:
      x: rows, those of group 0 first, then those of group 1, and so on.
      w: the groups' matrices, in x's dtype.
      sizes: the number of rows of each group. Their sum is at most the number of rows; what the rows after them give, and the
        derivative by them, is undefined.
    """
    return jax.lax.platform_dependent(x, w, sizes, tpu=jax.lax.ragged_dot, default=in_tiles)


@jax.custom_vjp
def in_tiles(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """`grouped_product` a tile of rows at a time. Rows after the last group give zeros. Without a forward-mode derivative."""
    return _of_rows(x, w, sizes, "nn")


def _forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return in_tiles(x, w, sizes), (x, w, sizes)


def _backward(kept: tuple[jax.Array, ...], d: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = kept
    return _of_rows(d, w, sizes, "nt"), _of_matrices(x, d, sizes).astype(w.dtype), None


in_tiles.defvjp(_forward, _backward)


def _steps(rows: int, sizes: jax.Array, tile: int) -> tuple[jax.Array, Any]:
    """The number of steps, and step → (its group, the first row of its tile, which rows of the tile are the group's [tile, 1]).

    A tile may have rows of several groups, and a group rows in several tiles, so there are fewer steps than tiles and groups
    together. A group without rows has none.
    """
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = starts // tile
    each = jnp.where(sizes > 0, (ends - 1) // tile - first + 1, 0)
    until = jnp.cumsum(each)

    def step(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        group = jnp.searchsorted(until, i, side="right")
        own = (first[group] + i - until[group] + each[group]) * tile
        begin = jnp.minimum(
            own, rows - tile
        )  # the last tile is as long as the others, and repeats rows of the one before
        row = begin + jnp.arange(tile)
        return group, begin, ((row >= jnp.maximum(own, starts[group])) & (row < ends[group]))[:, None]

    return until[-1], step


def _of_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, form: Any) -> jax.Array:
    tile = min(_TILE, x.shape[0])
    count, step = _steps(x.shape[0], sizes, tile)
    out = w.shape[2] if form == "nn" else w.shape[1]

    def body(i: jax.Array, y: jax.Array) -> jax.Array:
        group, begin, mine = step(i)
        new = product(jax.lax.dynamic_slice_in_dim(x, begin, tile), w[group], form, x.dtype)
        old = jax.lax.dynamic_slice_in_dim(y, begin, tile)
        return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(mine, new, old), begin, 0)

    return jax.lax.fori_loop(0, count, body, jnp.zeros((x.shape[0], out), x.dtype))


def _of_matrices(x: jax.Array, d: jax.Array, sizes: jax.Array) -> jax.Array:
    """Σ over the rows of each group of x_r d_rᵀ, float32 or wider."""
    tile = min(_TILE, x.shape[0])
    count, step = _steps(x.shape[0], sizes, tile)
    wide = wide_dtype(x.dtype, d.dtype)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        group, begin, mine = step(i)
        part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=begin, slice_size=tile)
        return total.at[group].add(product(part(x), jnp.where(mine, part(d), 0), "tn", wide))

    return jax.lax.fori_loop(0, count, body, jnp.zeros((sizes.shape[0], x.shape[1], d.shape[1]), wide))
