"""Memory as a gate (MAG, Titans §4.2): a memory and sliding-window attention side by side."""

from typing import NamedTuple

import jax
from flax import nnx

from atlasjax.mixers.attention import KVCache, WindowCache
from atlasjax.nn.attention import AttentionHeads, output_projection, require_shared_heads, required_window
from atlasjax.nn.cache_check import check_state
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import RMSNorm
from atlasjax.nn.memory_mixer import MemoryHeads, MemoryMixerState
from atlasjax.nn.module import LayerwiseModule, Module, ObservedModule


class HybridState(NamedTuple):
    """The memory's state, and the keys and values in the attention window."""

    memory: MemoryMixerState
    window: KVCache | WindowCache


class GatedHeads(Module):
    """Attention gated by memory in each head, and the output projection (Titans §4.2):

        out = (RMSNorm(attention) ⊙ σ(RMSNorm(memory))) W_out        both norms have a learned scale per channel

    Args:
      config: dim, num_heads, head_dim, value_expansion, norm_eps, output_scale.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        shape = (config.num_heads, config.value_dim)
        self.attention_norm = RMSNorm(shape, ("heads", None), config.norm_eps)
        self.memory_norm = RMSNorm(shape, ("heads", None), config.norm_eps)
        self.out = output_projection(config, rngs)

    def __call__(self, attention: jax.Array, memory: jax.Array) -> jax.Array:
        """Both [batch, time, heads, value_dim] → [batch, time, dim]."""
        y = self.attention_norm(attention) * jax.nn.sigmoid(self.memory_norm(memory))
        return self.out(y.reshape(*y.shape[:2], -1))


class MAGMixer(ObservedModule, LayerwiseModule):
    """Memory as a gate (Titans Eq. 26–28, A Figure 3): sliding-window attention and memory side by side.

        a = SWA(x),  m = memory(x)             with separate projections; the attention also sees the persistent tokens
        out = (RMSNorm(a) ⊙ σ(RMSNorm(m))) W_out

    Titans' o = y ⊗ M(x̃) "normalizes the outputs y and M(x̃) with learnable vectors, followed by a non-linearity σ". We interpret
    this as a norm per head for both, and a sigmoid σ on the memory branch only. Titans prepends the persistent tokens to the
    sequence. Here they are keys and values of the attention, and the memory has its learned M_0 instead.

    Works with any rule of `rules.REGISTRY`. The state is bounded unless a softmax memory keeps every token. Cost per token: the
    memory's, and attention over the window.

    Args:
      config: as for `MemoryHeads` and `AttentionHeads`. attention.window is required.
      rngs: source of the initial values.

    Raises:
      ValueError: there is no window, head_dim is odd, values are wider than keys but the memory has a residual, or the attention
        has a gate or sizes of its own.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        require_shared_heads(config, "mag")
        self.attention = AttentionHeads(config, required_window(config, "mag"), rngs=rngs)
        self.memory = MemoryHeads(config, similar_keys=True, rngs=rngs)  # inputs are attention averages
        self.undivided = self.memory.undivided
        self.join = GatedHeads(config, rngs=rngs)

    def observe(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """[batch, time, dim] → [batch, time, dim], and `Rule.weight_norm` [batch, heads] after the last token. Arguments as for
        `MemoryHeads.scan`."""
        m, _, norm = self.memory.scan(x, segment_ids, max_segments)
        return self.join(self.attention(x, segment_ids), m), norm

    def init_state(self, batch_size: int, max_length: int | None = None) -> HybridState:
        """The state before the first token. `max_length`: see `memory.init_state`."""
        return HybridState(self.memory.init_state(batch_size, max_length), self.attention.init_cache(batch_size))

    def extend_layer(self, x: jax.Array, states: HybridState, layer: jax.Array | None) -> tuple[jax.Array, HybridState]:
        """`extend` in the states of all layers. See `mixers.LayerwiseMixer`."""
        check_state(self, states, HybridState)
        m, _, memory = self.memory.scan_from(x, states.memory, layer)
        a, window = self.attention.extend(x, states.window, layer)
        return self.join(a, m), HybridState(memory, window)
