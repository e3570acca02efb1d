"""Matrices in global memory, computed tile by tile: the building blocks of the GPU kernels of Newton–Schulz.

A multiprocessor has 256 kB of registers and 228 kB of shared memory. The iteration of one 128 × 128 matrix with exact products
needs more, and a backward pass several times that. So a program holds one tile of one product at a time, and its matrices are in
a workspace in global memory. The L2 cache holds this workspace entirely at 64 rows, and partly beyond. `each_tile` is a phase. It
does not read the matrices that it writes, so its tiles may be computed in any order, and it ends with a barrier, after which all
threads of the program see the results.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.arguments import Index, Interpret
from pallas_kernels.blocks import iota
from pallas_kernels.gpu import Product, products

_DEPTH = 32  # terms that a product sums at a time


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The matrix ref[place] in tiles. `x[i, j]` reads a tile in float32, `x[i, j] = …` writes it."""

    ref: jax.Ref
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
        """Number of tiles along both axes."""
        rows, columns = self.ref.shape[-2:]
        return rows // self.tile, columns // self.tile


def repeat(count: Index, body: Callable[[Index], None]) -> None:
    """Calls `body(0)`, …, `body(count − 1)`."""
    jax.lax.fori_loop(0, count, lambda n, _: body(n), None)


def divide(n: Index, by: int) -> tuple[Index, Index]:
    """Quotient and remainder of n ≥ 0. Triton does not compile `//`."""
    if isinstance(n, int):
        return divmod(n, by)
    divisor = n.dtype.type(by)  # an index has 64 bits if jax's integers do
    return jax.lax.div(n, divisor), jax.lax.rem(n, divisor)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Products of tiles, loops over tiles, and the barrier of a program.

    `one` is 1, read from memory, so that loop bounds are unknown to the compiler. It would unroll loops with known bounds and
    keep the addresses of all their tiles in registers until they spill. The interpreter is sequential and needs no barrier.
    """

    product: Product
    barrier: Callable[[], None]
    one: jax.Array

    @classmethod
    def of(cls, exact: bool, interpret: Interpret, one: jax.Array) -> "Arithmetic":
        barrier = (lambda: None) if interpret else triton.debug_barrier
        return cls(products(jnp.float32 if exact else jnp.bfloat16, interpret), barrier, one)

    def _sum(self, count: int, term: Callable[[Index], jax.Array], start: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count * self.one, lambda n, total: total + term(n), start)

    def each_tile(self, shape: tuple[int, int], body: Callable[[Index, Index], None]) -> None:
        """A phase: calls `body(i, j)` for all tiles of `shape`, then waits at a barrier."""
        repeat(shape[0] * shape[1] * self.one, lambda n: body(*divide(n, shape[1])))
        self.barrier()

    def dot(
        self, x: Matrix, y: Matrix, i: Index, j: Index, start: jax.Array | None = None, transposed: bool = False
    ) -> jax.Array:
        """Tile (i, j) of x y or x yᵀ, added to `start`."""

        def term(k: Index) -> jax.Array:
            other = y.block(j, k, x.tile, depth) if transposed else y.block(k, j, depth, x.tile)
            return self.product(x.block(i, k, x.tile, depth), other, 1, 1 if transposed else 0)

        depth = min(x.tile, _DEPTH)
        start = jnp.zeros((x.tile, x.tile), jnp.float32) if start is None else start
        return self._sum(x.ref.shape[-1] // depth, term, start)

    def total(self, shape: tuple[int, int], tile: Callable[[Index, Index], jax.Array]) -> jax.Array:
        """The sum of all entries of the tiles (i, j), a scalar."""
        term = lambda n: jnp.sum(jnp.sum(tile(*divide(n, shape[1])), axis=1))
        return self._sum(shape[0] * shape[1], term, jnp.zeros((), jnp.float32))

    def trace(self, x: Matrix) -> jax.Array:
        """The trace of a square matrix, a scalar."""
        return self.total((x.shape[0], 1), lambda i, _: jnp.where(identity(x.tile, 0, 0) > 0, x[i, i], 0.0))


def identity(tile: int, i: Index, j: Index) -> jax.Array:
    """Tile (i, j) of the identity."""
    return (iota(tile, 0) + (i - j) * tile == iota(tile, 1)).astype(jnp.float32)
