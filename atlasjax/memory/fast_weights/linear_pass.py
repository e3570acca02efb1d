"""`linear.linear_scan` with the GPU kernel of the recurrence: all blocks are prepared together, then the kernel, then all reads.

`linear_scan` starts several small kernels for each block, one block after another. Here only the recurrence is in turn, and it is
one kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.memory.blocks import product_dtype
from atlasjax.memory.fast_weights.chunk import Slot
from atlasjax.memory.fast_weights.linear import decayed_to_end, over_slots, prepare, read, scores_of, tokens_of
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from pallas_kernels.linear_rule import memory_pass


class _Parts(NamedTuple):
    """The parts of a block that do not depend on the memory, in the order of `memory_pass`."""

    written: jax.Array
    removed: jax.Array | None
    keys: jax.Array
    added: jax.Array | None
    decay: jax.Array | None


def linear_pass(
    rule: MemorySpec, dtype: jnp.dtype, params: MemoryParams, memory: Weights, slots: Slot, resets: jax.Array | None
) -> tuple[jax.Array, Weights]:
    """Arguments and results as of `linear_scan`, for a rule without a step size per channel."""
    narrow = product_dtype(dtype)

    def parts(params: MemoryParams, slot: Slot) -> _Parts:
        tokens = tokens_of(rule, params, slot)
        if tokens.removal is None:
            assert tokens.added is not None
            keys, decay = decayed_to_end(tokens.added.key, tokens.decay)
            return _Parts(tokens.added.value, None, keys, None, decay)
        block = prepare(rule, narrow, tokens, scores_of(rule, tokens).system)
        assert block.written is not None
        assert block.write_end is not None
        return _Parts(block.written, block.removed, block.write_end, block.added, block.decay)

    def read_block(params: MemoryParams, slot: Slot, W: jax.Array, u: jax.Array) -> jax.Array:
        tokens = tokens_of(rule, params, slot)
        return read(narrow, tokens, scores_of(rule, tokens).read, W, u).astype(dtype)

    # The scores of a block are as large as its tokens, so the backward pass computes them again.
    found = jax.checkpoint(over_slots(parts))(params, slots)
    found = found._replace(written=found.written.astype(narrow))
    start = rule.start(params.weights)["W"]
    before, u, last = memory_pass(
        found.written, found.removed, found.keys, found.added, found.decay, memory["W"], start, resets
    )
    wide = memory["W"].dtype
    return jax.checkpoint(over_slots(read_block))(params, slots, before.astype(wide), u.astype(wide)), {
        "W": last.astype(wide)
    }
