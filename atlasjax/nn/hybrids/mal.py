"""Memory as a layer (MAL, Titans §4.3): a memory, then sliding-window attention, in one mixer."""

import jax
from flax import nnx

from atlasjax.nn.attention import AttentionHeads, output_projection, require_shared_heads, required_window
from atlasjax.nn.cache_check import check_state
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.hybrids.mag import HybridState
from atlasjax.nn.layers import RMSNorm
from atlasjax.nn.memory_mixer import MemoryMixer
from atlasjax.nn.module import LayerwiseModule, ObservedModule


class MALMixer(ObservedModule, LayerwiseModule):
    """Memory as a layer (Titans Eq. 29–31): a memory, then sliding-window attention over its output, in one mixer.

        y = memory(x)                          `MemoryMixer`, including its output gate and projection
        out = SWA(RMSNorm(y)) W_out            the attention also sees the persistent tokens; no residual between the two

    Works with any rule of `rules.REGISTRY`. State and cost are those of `MAGMixer`.

    Args:
      config: as for `MemoryMixer` and `AttentionHeads`. attention.window is required.
      rngs: source of the initial values.

    Raises:
      ValueError: there is no window, head_dim is odd, values are wider than keys but the memory has a residual, or the attention
        has a gate or sizes of its own.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        require_shared_heads(config, "mal")
        self.memory = MemoryMixer(config, similar_keys=True, rngs=rngs)  # inputs are attention averages
        self.undivided = self.memory.undivided
        self.norm = RMSNorm((config.dim,), ("embed",), config.norm_eps)
        self.attention = AttentionHeads(config, required_window(config, "mal"), rngs=rngs)
        self.out = output_projection(config, rngs)

    def observe(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """[batch, time, dim] → [batch, time, dim], and `Rule.weight_norm` [batch, heads] after the last token. Arguments as for
        `MemoryHeads.scan`."""
        y, norm = self.memory.observe(x, segment_ids, max_segments)
        return self._output(self.attention(self.norm(y), segment_ids)), norm

    def init_state(self, batch_size: int, max_length: int | None = None) -> HybridState:
        """The state before the first token. `max_length`: see `memory.init_state`."""
        return HybridState(self.memory.init_state(batch_size, max_length), self.attention.init_cache(batch_size))

    def extend_layer(self, x: jax.Array, states: HybridState, layer: jax.Array | None) -> tuple[jax.Array, HybridState]:
        """`extend` in the states of all layers. See `mixers.LayerwiseMixer`."""
        check_state(self, states, HybridState)
        y, memory = self.memory.extend_layer(x, states.memory, layer)
        y, window = self.attention.extend(self.norm(y), states.window, layer)
        return self._output(y), HybridState(memory, window)

    def _output(self, y: jax.Array) -> jax.Array:
        return self.out(y.reshape(*y.shape[:2], -1))
