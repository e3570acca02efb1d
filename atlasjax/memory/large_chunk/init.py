"""Fresh states of a `LargeChunkRule`. Its parameters are those of a `MemoryRule`."""

import jax
import jax.numpy as jnp

from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.large_chunk.spec import LargeChunkSpec
from atlasjax.memory.large_chunk.state import LargeChunkState
from atlasjax.memory.products import wide_dtype


def init_state(
    rule: LargeChunkSpec, params: MemoryParams, *, batch_size: int, max_length: int | None = None
) -> LargeChunkState:
    """A fresh memory for every batch element: M = M_0, and nothing to write. `max_length` has no effect, because the size of the
    state does not depend on the number of tokens."""
    dtype = wide_dtype(next(iter(params.weights.values())).dtype)
    memory = {name: jnp.broadcast_to(w.astype(dtype), (batch_size, *w.shape)) for name, w in params.weights.items()}
    heads = next(iter(params.weights.values())).shape[0]
    zeros = lambda: jax.tree.map(jnp.zeros_like, memory)
    return LargeChunkState(
        memory=memory,
        sums=zeros(),
        momentum=zeros() if rule.momentum else None,
        decay_sum=jnp.zeros((batch_size, heads), dtype) if rule.momentum else None,
        position=jnp.zeros(batch_size, jnp.int32),
        segment=jnp.full(batch_size, -1, jnp.int32),
    )
