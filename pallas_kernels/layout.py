"""Conversion of token sequences to chunks of each head."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # of a tile


def matrix_unit() -> int:
    """Rows and columns of a matrix unit of the TPU for which a program is traced: 128, and 256 from v6e on.

    128 if there is no TPU, as for the interpreter. To compile for another device than jax's, trace in the context of its mesh
    (`jax.sharding.use_abstract_mesh`).
    """
    try:
        return pltpu.get_tpu_info().mxu_column_size
    except ValueError:  # not a TPU
        return 128


def to_chunks(x: jax.Array, size: int, fill: float = 0.0) -> jax.Array:
    """[batch, time, heads, n] → [batch · heads, chunks, size, n]. The last chunk is padded with `fill`."""
    batch, time, heads, n = x.shape
    count = -(-time // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - time), (0, 0), (0, 0)), constant_values=fill)
    return jnp.moveaxis(x, 2, 1).reshape(batch * heads, count, size, n)


def gates_to_chunks(gates: list[tuple[jax.Array, float]], size: int) -> jax.Array:
    """Pairs of (gate [batch, time, heads] or [batch, time, heads, n], fill) → float32 [batch, heads, chunks, rows, size].

    Tokens are in lanes, because a column would use only one lane of 128.
    """
    wide = lambda x: x.astype(jnp.float32) if x.ndim == 4 else x.astype(jnp.float32)[..., None]
    rows = jnp.concatenate([to_chunks(wide(x), size, fill) for x, fill in gates], axis=-1).mT
    batch, _, heads = gates[0][0].shape[:3]
    return rows.reshape(batch, heads, *rows.shape[1:])


def from_chunks(y: jax.Array, batch: int, time: int) -> jax.Array:
    """[batch · heads, chunks, size, n] → [batch, time, heads, n]."""
    y = y.reshape(batch, y.shape[0] // batch, -1, y.shape[-1])
    return jnp.moveaxis(y, 1, 2)[:, :time]


class Beside(NamedTuple):
    """Arrays with P neighbouring heads side by side in lanes, as one head (see `side_by_side`)."""

    heads: int

    @classmethod
    def of(cls, heads: int, chunk_size: int) -> "Beside":
        """The largest number that divides `heads` and the number of a chunk's systems that fit in a tile's lanes."""
        return cls(math.gcd(heads, max(1, LANES // chunk_size)))

    def tokens(self, x: jax.Array) -> jax.Array:
        """[batch, time, heads, dim] → [batch, time, heads / P, P · dim]."""
        return x.reshape(*x.shape[:2], x.shape[2] // self.heads, -1)

    def gates(self, gates: jax.Array) -> jax.Array:
        """[batch, heads, chunks, n, m] → [batch, heads / P, chunks, n · P, m], the rows of one gate together."""
        batch, heads, chunks, n, m = gates.shape
        gates = jnp.moveaxis(gates.reshape(batch, heads // self.heads, self.heads, chunks, n, m), 2, 4)
        return gates.reshape(*gates.shape[:3], n * self.heads, m)

    def weights(self, w: jax.Array) -> jax.Array:
        """[batch, heads, value_dim, key_dim] → float32 [batch, heads / P, value_dim, P · key_dim]."""
        batch, heads, value_dim, key_dim = w.shape
        w = w.astype(jnp.float32).reshape(batch, heads // self.heads, self.heads, value_dim, key_dim)
        return jnp.moveaxis(w, 2, 3).reshape(batch, heads // self.heads, value_dim, -1)

    def separate(self, w: jax.Array, key_dim: int) -> jax.Array:
        """The inverse of `weights`."""
        batch, groups, value_dim, _ = w.shape
        w = jnp.moveaxis(w.reshape(batch, groups, value_dim, self.heads, key_dim), 3, 2)
        return w.reshape(batch, groups * self.heads, value_dim, key_dim)
