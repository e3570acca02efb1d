"""Types of the arguments that kernels share."""

from collections.abc import Callable

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Arrays = tuple[jax.Array, ...]
Interpret = bool | pltpu.InterpretParams  # of `pallas_call`
Index = int | jax.Array  # of a loop: a Python integer or a traced one
Slice = slice | pl.Slice  # of `pl.ds`: static, or with a traced start
# product(x, y, x_axis, y_axis) contracts two matrices and accumulates in float32.
Product = Callable[[jax.Array, jax.Array, int, int], jax.Array]
