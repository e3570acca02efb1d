"""Code shared by the delta rule's kernels for single chunks: their grid, and the gates of a chunk."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import gpu
from pallas_kernels.arguments import Interpret, Slice
from pallas_kernels.batching import rows_folded
from pallas_kernels.blocks import iota

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of `size` tokens of arrays of tokens [batch, time, heads, channels] and of states [batch · heads, chunks, …].

    There is one program for each chunk of each head. time is a multiple of `size`.
    """

    heads: int
    size: int

    def token_block(self, shape: Sequence[int]) -> pl.BlockSpec:
        """[batch, time, heads] or [batch, time, heads, channels]."""
        rest = tuple(shape[3:])
        return pl.BlockSpec(
            (None, self.size, None, *rest),
            lambda row, i: (row // self.heads, i, row % self.heads, *(0 for _ in rest)),
        )

    def state_block(self, shape: Sequence[int]) -> pl.BlockSpec:
        """[batch · heads, chunks, …]."""
        rest = tuple(shape[2:])
        return pl.BlockSpec((None, None, *rest), lambda row, i: (row, i, *(0 for _ in rest)))

    def call(
        self,
        kernel: Callable[..., None],
        tokens: Sequence[jax.Array],
        states: Sequence[jax.Array],
        token_outputs: Sequence[tuple[int | None, jax.typing.DTypeLike]],
        state_outputs: Sequence[tuple[tuple[int, ...], jax.typing.DTypeLike]],
        *,
        warps: int,
        interpret: Interpret,
        name: str,
    ) -> tuple[jax.Array, ...]:
        """Runs a kernel whose arguments are references to one chunk of the tokens, the states and the outputs, in this order.

        Args:
          kernel, tokens, states: the kernel and its inputs.
          token_outputs: (channels, dtype) of each. None for channels means one number per token.
          state_outputs: (shape of one chunk, dtype) of each.
          warps, interpret, name: options of the kernel.
        """
        count = len(tokens)

        @rows_folded
        def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            batch, time = arrays[0].shape[:2]
            rows, chunks = batch * self.heads, time // self.size
            gate = (batch, time, self.heads)
            of_tokens = [jax.ShapeDtypeStruct(gate if n is None else (*gate, n), dtype) for n, dtype in token_outputs]
            of_states = [jax.ShapeDtypeStruct((rows, chunks, *shape), dtype) for shape, dtype in state_outputs]
            specs = lambda tokens, states: [
                *(self.token_block(x.shape) for x in tokens), *(self.state_block(x.shape) for x in states)
            ]  # fmt: skip
            return tuple(
                gpu.call(
                    kernel, warps=warps, interpret=interpret, name=name, grid=(rows, chunks),
                    out_shape=[*of_tokens, *of_states],
                    in_specs=specs(arrays[:count], arrays[count:]), out_specs=specs(of_tokens, of_states),
                )(*arrays)
            )  # fmt: skip

        return call(*tokens, *states)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Channels in parts of `size`, one product per part. Larger parts would spill registers."""

    channels: int
    size: int

    @overload
    def each(self, step: Callable[[Slice, None], None]) -> None: ...

    @overload
    def each(self, step: Callable[[Slice, Carry], Carry], carry: Carry) -> Carry: ...

    def each(self, step: Callable[[Slice, Any], Any], carry: Any = None) -> Any:
        """The carry after `step(slice, carry)` for every part."""
        if self.channels <= self.size:
            return step(pl.ds(0, self.channels), carry)
        part = lambda i: pl.ds(pl.multiple_of(i * self.size, self.size), self.size)
        return jax.lax.fori_loop(0, self.channels // self.size, lambda i, carry: step(part(i), carry), carry)

    def total(self, function: Callable[[Slice], jax.Array], *shape: int) -> jax.Array:
        """Σ function(slice), of the given shape."""
        return self.each(lambda part, sum: sum + function(part), jnp.zeros(shape, jnp.float32))


def parts(channels: int, dtype: jax.typing.DTypeLike, *, narrow: bool = False) -> Parts:
    """Parts as wide as registers allow, or half as wide if `narrow`. A loop over two parts uses fewer registers than no loop."""
    widest = 64 if dtype == jnp.bfloat16 else 32
    return Parts(channels, 16 if channels <= 32 else widest // 2 if narrow else widest)


def given(*arrays: jax.Array | None) -> list[jax.Array]:
    return [x for x in arrays if x is not None]


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def last(x: jax.Array) -> jax.Array:
    """The last entry of x [m]."""
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.sum(jnp.where(place == x.shape[0] - 1, x, 0.0))


@dataclasses.dataclass(frozen=True)
class Decays:
    """α of a chunk of m tokens and its products.

    alpha: α, [m]. products: P, [m, m], P[t,i] = α_{i+1} … α_t. start: A, [m], A_t = α_0 … α_t. end: P's last row, [m].
    """

    alpha: jax.Array
    products: jax.Array
    start: jax.Array
    end: jax.Array


def decays(alpha: jax.Array) -> Decays:
    """From α [m] ≥ 0."""
    p = _products(alpha, 0)
    end = jnp.sum(jnp.where(iota(alpha.shape[0], 0) == alpha.shape[0] - 1, p, 0.0), axis=0)
    return Decays(alpha, p, _first_entry(alpha) * _first_column(p), end)


def from_products(decays: Decays, dproducts: jax.Array, product: gpu.Product) -> jax.Array:
    """α's cotangent [m] from that of P (zero above the diagonal), without quotients: Σ_{s≥t>i} P[s,t] dP[s,i] P[t−1,i]."""
    return jnp.sum(product(decays.products, dproducts, 0, 0) * _before(decays.alpha), axis=1)


def from_ends(decays: Decays, dstart: jax.Array, dend: jax.Array | None) -> jax.Array:
    """α's cotangent [m] from those of A and of P's last row: `from_products` for one column and one row of dP."""
    first, before = _first_entry(decays.alpha), _before(decays.alpha)
    place = jax.lax.broadcasted_iota(jnp.int32, dstart.shape, 0)
    dalpha = first * jnp.sum(decays.products * dstart[:, None], axis=0) * _first_column(before)
    dalpha += jnp.where(place == 0, jnp.sum(dstart * _first_column(decays.products)), 0.0)
    return dalpha if dend is None else dalpha + decays.end * jnp.sum(before * dend[None, :], axis=1)


def _before(alpha: jax.Array) -> jax.Array:
    """P[t−1,i] for t > i, else 0."""
    row, column = iota(alpha.shape[0], 0), iota(alpha.shape[0], 1)
    return _products(jnp.sum(jnp.where(row == column + 1, alpha[None, :], 0.0), axis=1), 1)


def _products(alpha: jax.Array, offset: int) -> jax.Array:
    """α_{i+1+offset} … α_t for t ≥ i + offset, else 0. Sums of logarithms restart in each column, so that none of them cancels."""
    row, column = iota(alpha.shape[0], 0), iota(alpha.shape[0], 1) + offset
    logs = jnp.where(alpha > 0.0, jnp.log(jnp.where(alpha > 0.0, alpha, 1.0)), -jnp.inf)
    sums = jnp.cumsum(jnp.where(row > column, logs[:, None], 0.0), axis=0)
    return jnp.where(row >= column, jnp.exp(sums), 0.0)


def _first_entry(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) == 0, x, 0.0))


def _first_column(p: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(iota(p.shape[0], 1) == 0, p, 0.0), axis=1)
