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


# The chunks of packed segments: a chunk goes on with the memory of the previous one, begins a segment with the initial memory, or
# has no tokens and changes nothing.
CONTINUES, BEGINS, EMPTY = 0, 1, 2


class Segments(NamedTuple):
    """Packed segments, each from the start of a chunk, with padding at the end of its last one.

    Attributes:
      marks: CONTINUES, BEGINS or EMPTY for each chunk, int32 [batch, chunks]. Empty chunks come last.
      start: the initial memory of segments, an array or a tree of arrays [heads, out, in]. Momenta begin with zero.
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
                    f"{where}: segments.{name} has shape {x.shape}, should be {shape}, for {time} tokens in whole chunks of "
                    f"{chunk_size}."
                )

    def rows(self, heads: int) -> jax.Array:
        """The marks of each row, [batch · heads, chunks]."""
        return jnp.repeat(self.marks.astype(jnp.int32), heads, axis=0)

    def start_rows(self, start: jax.Array) -> jax.Array:
        """One of the initial weights for each row, float32 [batch · heads, out, in]."""
        return jnp.tile(start.astype(jnp.float32), (self.marks.shape[0], 1, 1))


# product(x, y, x_axis, y_axis) contracts two matrices and accumulates in float32.
Product = Callable[[jax.Array, jax.Array, int, int], jax.Array]
