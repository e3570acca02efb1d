"""Types of the arguments that kernels share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Arrays = tuple[jax.Array, ...]
Interpret = bool | pltpu.InterpretParams  # of `pallas_call`
Index = int | jax.Array  # of a loop: a Python integer or a traced one
Slice = slice | pl.Slice  # of `pl.ds`: static, or with a traced start


def rows_of(x: jax.Array) -> jax.Array:
    """[batch, heads, …] → [batch · heads, …]."""
    return x.reshape(-1, *x.shape[2:])


# The chunks of packed segments: a chunk goes on with the memory of the previous one, begins a segment with the initial memory, or
# has no tokens and changes nothing.
CONTINUES, BEGINS, EMPTY = 0, 1, 2


class Segments(NamedTuple):
    """Packed segments, each from the start of a chunk, with padding at the end of its last one.

    Attributes:
      marks: CONTINUES, BEGINS or EMPTY for each chunk, int32 [batch, chunks]. Empty chunks come last.
      start: the initial memory of segments, an array or a dict of arrays [heads, out, in]. Momenta begin with zero.
      real: 1 for tokens and 0 for padding, [batch, time].
    """

    marks: jax.Array
    start: Any
    real: jax.Array

    def check(self, where: str, batch: int, time: int, chunk_size: int) -> None:
        """Raises ValueError if the marks or `real` do not fit tokens [batch, time, …]."""
        for name, x, shape in (
            ("marks", self.marks, (batch, time // chunk_size)),
            ("real", self.real, (batch, time)),
        ):
            if x.shape != shape or time % chunk_size:
                raise ValueError(
                    f"{where}: segments.{name} has shape {x.shape}, must be {shape}, for {time} tokens in whole chunks of "
                    f"{chunk_size}."
                )

    def rows(self, heads: int) -> jax.Array:
        """The marks of each row, [batch · heads, chunks]."""
        return jnp.repeat(self.marks.astype(jnp.int32), heads, axis=0)

    def start_of_heads(self, start: jax.Array) -> jax.Array:
        """One of the initial weights for each head, float32 [batch, heads, out, in]."""
        return jnp.broadcast_to(start.astype(jnp.float32), (self.marks.shape[0], *start.shape))

    def start_rows(self, start: jax.Array) -> jax.Array:
        """One of the initial weights for each row, float32 [batch · heads, out, in]."""
        return rows_of(self.start_of_heads(start))


class Window(NamedTuple):
    """The c − 1 tokens before the first one of a call, oldest first.

    Attributes:
      keys, values: [batch, heads, c − 1, key_dim or value_dim].
      num_real: how many of them are real, int32 [batch]: the last ones.
      floor: their `floor` of `chunk_memory`, [batch, heads, c − 1]. None means 0.
    """

    keys: jax.Array
    values: jax.Array
    num_real: jax.Array
    floor: jax.Array | None = None

    @property
    def real(self) -> jax.Array:
        """Whether each token is real, [batch, c − 1]."""
        past = self.keys.shape[2]
        return jnp.arange(past) >= past - self.num_real[:, None]

    @property
    def real_floor(self) -> jax.Array | None:
        return None if self.floor is None else jnp.where(self.real[:, None], self.floor, 0.0)

    def of_heads(self, size: int) -> Arrays:
        """Keys, values and whether they are real, float32 [batch, heads, size, key_dim, value_dim or 1], with size ≥ c − 1."""
        batch, heads, past, _ = self.keys.shape
        real = jnp.broadcast_to(self.real[:, None, :, None], (batch, heads, past, 1))
        return tuple(
            jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (size - past, 0), (0, 0)))
            for x in (self.keys, self.values, real)
        )


DTYPES = (jnp.float32, jnp.bfloat16)  # of tokens in kernels


def check_rule(
    where: str, q: jax.Array, k: jax.Array, v: jax.Array,
    others: Callable[[int, int, int, int, int], dict[str, tuple[jax.Array | None, tuple[int, ...]]]],
    chunk_size: int, segments: Segments | None, implementation: str, implementations: tuple[str, ...],
) -> None:  # fmt: skip
    """Raises ValueError for arguments of a rule of a matrix memory that none of its implementations takes.

    others: its other arrays and their shapes, by name, from batch, time, heads, key_dim and value_dim.
    """
    # A q without four axes has a shape that no array should have, so the first message names it.
    batch, time, heads, key_dim = q.shape if q.ndim == 4 else (0, 0, 0, 0)
    sizes = (batch, time, heads, key_dim, v.shape[-1])
    wanted = {"q": (q, sizes[:4]), "k": (k, sizes[:4]), "v": (v, (*sizes[:3], sizes[4])), **others(*sizes)}
    for name, (x, shape) in wanted.items():
        if x is not None and (x.shape != shape or not time):
            raise ValueError(f"{where}: {name} has shape {x.shape}, must be {shape}, with q {q.shape} and v {v.shape}.")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        raise ValueError(
            f"{where}: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, should all be float32 or all bfloat16."
        )
    if implementation not in implementations:
        raise ValueError(f"{where}: implementation={implementation!r}, must be one of {implementations}.")
    if chunk_size < 8 or chunk_size & (chunk_size - 1):
        raise ValueError(f"{where}: chunk_size={chunk_size}, must be a power of two ≥ 8.")
    if segments is not None:
        segments.check(where, batch, time, chunk_size)


# product(x, y, x_axis, y_axis) contracts two matrices and accumulates in float32.
Product = Callable[[jax.Array, jax.Array, int, int], jax.Array]
