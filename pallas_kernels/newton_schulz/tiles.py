"""Matrices in global memory, computed a square tile at a time: what the GPU kernels of Newton–Schulz are written in.

A multiprocessor has 256 kB of registers and 228 kB of shared memory. The iteration of one 128 × 128 matrix in exact products takes
more, a backward pass several times that. So a program holds one tile of one product at a time, and its matrices lie in a workspace
in global memory, which the second-level cache holds at 64 rows and in part beyond. `each_tile` is a phase: it writes matrices that
it does not read, so its tiles may be computed in any order, and it ends with a barrier, after which all threads of the program see
them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.blocks import iota
from pallas_kernels.gpu import Product, products

_DEPTH = 32  # of a product: what it sums over at once

Index = Any  # a Python integer or a traced one


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The matrix ref[place] in tiles: `x[i, j]` reads a tile in float32, `x[i, j] = …` writes it."""

    ref: Any
    place: Index
    tile: int

    def block(self, i: Index, j: Index, rows: int, columns: int) -> jax.Array:
        """Block (i, j) of [rows, columns], float32."""
        return self.ref[self.place, pl.ds(i * rows, rows), pl.ds(j * columns, columns)].astype(jnp.float32)

    def __getitem__(self, position: tuple[Index, Index]) -> jax.Array:
        return self.block(*position, self.tile, self.tile)

    def __setitem__(self, position: tuple[Index, Index], value: jax.Array) -> None:
        self.ref[self.place, *(pl.ds(i * self.tile, self.tile) for i in position)] = value

    @property
    def shape(self) -> tuple[int, int]:
        """Tiles along both axes."""
        rows, columns = self.ref.shape[-2:]
        return rows // self.tile, columns // self.tile


def repeat(count: Index, body: Callable[[Index], None]) -> None:
    """`body(0)`, …, `body(count − 1)`."""
    jax.lax.fori_loop(0, count, lambda n, _: body(n), None)


def divide(n: Index, by: int) -> tuple[Index, Index]:
    """Quotient and remainder of n ≥ 0. Triton does not compile `//`."""
    if isinstance(n, int):
        return divmod(n, by)
    divisor = n.dtype.type(by)  # an index has 64 bits where jax's integers do
    return jax.lax.div(n, divisor), jax.lax.rem(n, divisor)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Products of tiles, loops over tiles, and the barrier of a program.

    `one` is 1, read from memory: loops with bounds that the compiler knows are unrolled, and the addresses of all their tiles are
    kept in registers until they spill. An interpreter computes one thing after another and needs no barrier.
    """

    product: Product
    barrier: Callable[[], None]
    one: jax.Array

    @classmethod
    def of(cls, exact: bool, interpret: Any, one: jax.Array) -> "Arithmetic":
        barrier = (lambda: None) if interpret else triton.debug_barrier
        return cls(products(jnp.float32 if exact else jnp.bfloat16, interpret), barrier, one)

    def _sum(self, count: int, term: Callable[[Index], jax.Array], start: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count * self.one, lambda n, total: total + term(n), start)

    def each_tile(self, shape: tuple[int, int], body: Callable[[Index, Index], None]) -> None:
        """A phase: `body(i, j)` for all tiles of `shape`, then a barrier."""
        repeat(shape[0] * shape[1] * self.one, lambda n: body(*divide(n, shape[1])))
        self.barrier()

    def dot(
        self, x: Matrix, y: Matrix, i: Index, j: Index, start: jax.Array | None = None, transposed: bool = False
    ) -> jax.Array:
        """Tile (i, j) of x y, or of x yᵀ, added to `start`."""

        def term(k: Index) -> jax.Array:
            other = y.block(j, k, x.tile, depth) if transposed else y.block(k, j, depth, x.tile)
            return self.product(x.block(i, k, x.tile, depth), other, 1, 1 if transposed else 0)

        depth = min(x.tile, _DEPTH)
        start = jnp.zeros((x.tile, x.tile), jnp.float32) if start is None else start
        return self._sum(x.ref.shape[-1] // depth, term, start)

    def total(self, shape: tuple[int, int], tile: Callable[[Index, Index], jax.Array]) -> jax.Array:
        """The sum, a scalar, of all entries of the tiles (i, j)."""
        term = lambda n: jnp.sum(jnp.sum(tile(*divide(n, shape[1])), axis=1))
        return self._sum(shape[0] * shape[1], term, jnp.zeros((), jnp.float32))

    def trace(self, x: Matrix) -> jax.Array:
        """The sum, a scalar, of the diagonal of a square matrix."""
        return self.total((x.shape[0], 1), lambda i, _: jnp.where(identity(x.tile, 0, 0) > 0, x[i, i], 0.0))


def identity(tile: int, i: Index, j: Index) -> jax.Array:
    """Tile (i, j) of the identity."""
    return (iota(tile, 0) + (i - j) * tile == iota(tile, 1)).astype(jnp.float32)
