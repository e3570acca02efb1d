"""The history of a sequence as Legendre coefficients: how blocks are written to it, and how it is sampled.

C^(m+1) = P_m C^(m) + K_m [k, v of block m]        k, v: R C^(m)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from atlasjax.memory.grid import choose

# Coefficients alternate in sign and cancel, so products of bfloat16 inputs (the default on accelerators) are not accurate enough.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
Memory = tuple[jax.Array, jax.Array, jax.Array]  # coefficients, and the keys and values sampled from them


class Matrices(NamedTuple):
    """Bank and reconstruction matrix as float32 arrays on the device, and the operations that use them."""

    transitions: Float[Array, "blocks order order"]
    kernels: Float[Array, "blocks order block_size"]
    reconstruction: Float[Array, "samples order"]

    @property
    def order(self) -> int:
        return self.kernels.shape[1]

    @property
    def block_size(self) -> int:
        return self.kernels.shape[2]

    def uniform_states(
        self, k: Float[Array, "blocks batch size heads key_dim"], v: Float[Array, "blocks batch size heads value_dim"]
    ) -> Float[Array, "blocks batch order heads _channels"]:
        """C before each block of whole sequences.

        Only P_m C is sequential; the writes K_m [k, v] of all blocks are computed at once.
        """
        count = k.shape[0] - 1
        x = _together(k, v)
        empty = jnp.zeros((1, x.shape[1], self.order, *x.shape[3:]), jnp.float32)
        if not count or not self.order:
            return jnp.broadcast_to(empty, (count + 1, *empty.shape[1:]))
        writes = _einsum("mnl,mblhd->mbnhd", self.kernels[:count], x[:count])

        def step(c: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            p, write = xs
            c = _einsum("nk,bkhd->bnhd", p, c) + write
            return c, c

        # P_0 = 0, so the first state is the first write.
        _, later = jax.lax.scan(step, writes[0], (self.transitions[1:count], writes[1:]))
        return jnp.concatenate([empty, writes[:1], later])

    def states(
        self,
        k: Float[Array, "blocks batch size heads key_dim"],
        v: Float[Array, "blocks batch size heads value_dim"],
        index: Int[Array, "blocks batch"],
    ) -> Float[Array, "blocks batch order heads _channels"]:
        """C before each block of documents, where every row has its own block numbers: `index`, 0 at a document's first block."""
        x = _together(k, v)
        empty = jnp.zeros((x.shape[1], self.order, *x.shape[3:]), jnp.float32)
        if not self.kernels.size:
            return jnp.broadcast_to(empty, (x.shape[0], *empty.shape))

        def step(c: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, m = xs
            c = jnp.where((m > 0)[:, None, None, None], c, 0)
            return self.advance(c, x, m), c

        return jax.lax.scan(step, empty, (x, index))[1]

    def advance(
        self,
        c: Float[Array, "batch order heads channels"],
        x: Float[Array, "batch size heads channels"],
        index: Int[Array, " batch"],
    ) -> Float[Array, "batch order heads channels"]:
        """P_m C + K_m x for the tokens x of a block, whose number in its row is m = `index`."""
        m = jnp.minimum(index, self.kernels.shape[0] - 1)  # no later block reads what is written beyond the bank
        return _einsum("bnk,bkhd->bnhd", self.transitions[m], c) + _einsum("bnl,blhd->bnhd", self.kernels[m], x)

    def write(
        self,
        memory: Memory,
        k: Float[Array, "batch size heads key_dim"],
        v: Float[Array, "batch size heads value_dim"],
        index: Int[Array, " batch"],
        full: Bool[Array, " batch"],
    ) -> Memory:
        """The memory after a block of a stream, which is written only in the rows where it is full."""
        if not self.kernels.size:
            return memory

        def store(memory: Memory) -> Memory:
            c, mk, mv = memory
            c = jnp.where((index > 0)[:, None, None, None], c, 0)
            c = self.advance(c, _together(k, v), index)
            return choose(full, (c, *self.sample(c, mk, mv)), memory)

        return jax.lax.cond(jnp.any(full), store, lambda memory: memory, memory)

    def sample(
        self,
        coefficients: Float[Array, "batch order heads _channels"],
        k: Float[Array, "batch ... heads key_dim"],
        v: Float[Array, "batch ... heads value_dim"],
    ) -> tuple[Float[Array, "batch samples heads key_dim"], Float[Array, "batch samples heads value_dim"]]:
        """Keys and values at the sampled positions, in the dtypes and of the sizes of k and v."""
        samples = _einsum("sn,bnhd->bshd", self.reconstruction, coefficients)
        return samples[..., : k.shape[-1]].astype(k.dtype), samples[..., k.shape[-1] :].astype(v.dtype)


def _together(k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.concatenate([k.astype(jnp.float32), v.astype(jnp.float32)], axis=-1)
