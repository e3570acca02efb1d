"""The arrays of a fast-weight memory: learned parameters, and the recurrent state."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax.memory.axes.optimizers import OptimizerState


class MemoryParams(NamedTuple):
    """Learned (outer-loop) parameters of a memory. The first axis of every leaf is heads.

    Attributes:
      weights: M_0, name → [heads, out, in], float32. If the retention has a map, the input of the map (logits for `KL`).
      coefficients: learned coefficients of the feature map, [heads, …], float32, such as c_i, [heads, n]. None if it has none.
      norm: LayerNorm inside the memory, {"scale", "bias"}: [heads, value_dim], float32. None without one.
    """

    weights: dict[str, Float[Array, "heads _out _in"]]
    coefficients: Float[Array, "heads ..."] | None
    norm: dict[str, Float[Array, "heads value_dim"]] | None


class MemoryState(NamedTuple):
    """The state of a memory between calls: a pytree whose size does not depend on the number of tokens read.

    float32 (float64 for float64 inputs) and int32. The first axis of every leaf is batch. Fields without use in the rule are None.

    Attributes:
      memory: M_t, name → [batch, heads, out, in]. If the retention has a map, its accumulator (`MemoryRule.weights` maps it).
      chunk_start: M_{t'}, the memory at the start of the current chunk, at which gradients are taken.
      momentum: S_t, like `memory`. For a user-defined optimizer, the pytree of its `init`, leaves [batch, heads, …]. None if the
        optimizer has no state.
      window_keys: the last past = window − 1 keys, [batch, heads, past, key_dim], oldest first.
      window_values: their values, [batch, heads, past, value_dim].
      window_thresholds: their Huber thresholds, [batch, heads, past].
      window_count: number of real tokens among them, [batch]. A zero key may be a real one.
      position: number of tokens of the current chunk read so far, in [0, chunk_size), [batch].
      segment: segment id of the last token, [batch], −1 if no token had one.
    """

    memory: dict[str, Float[Array, "batch heads _out _in"]]
    chunk_start: dict[str, Float[Array, "batch heads _out _in"]] | None
    momentum: OptimizerState
    window_keys: Float[Array, "batch heads past key_dim"] | None
    window_values: Float[Array, "batch heads past value_dim"] | None
    window_thresholds: Float[Array, "batch heads past"] | None
    window_count: Int[Array, " batch"] | None
    position: Int[Array, " batch"] | None
    segment: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


def soup(states: Sequence[MemoryState], weights: Float[Array, " states"]) -> MemoryState:
    """The state of `memory.soup`: weighted sums of memories and momenta, at the start of a chunk, with an empty window."""
    total = lambda *leaves: sum(w.astype(x.dtype) * x for w, x in zip(weights, leaves, strict=True))
    memory = jax.tree.map(total, *(state.memory for state in states))
    empty = jax.tree.map(jnp.zeros_like, states[0])
    return empty._replace(
        memory=memory,
        window_thresholds=None if empty.window_thresholds is None else jnp.ones_like(empty.window_thresholds),
        # A copy, as in a fresh state.
        chunk_start=None if empty.chunk_start is None else jax.tree.map(jnp.copy, memory),
        momentum=jax.tree.map(total, *(state.momentum for state in states)),
        segment=states[0].segment,
    )
