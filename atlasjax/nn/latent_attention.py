"""Multi-head latent attention as a layer."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import latent_attention
from atlasjax.mixers.latent_attention import LatentCache
from atlasjax.nn.attention import output_projection
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, RMSNorm
from atlasjax.nn.module import LayerwiseModule
from atlasjax.nn.partition import mesh_partition


class LatentAttentionMixer(LayerwiseModule):
    """Causal multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; transformers: DeepseekV3Attention, KimiLinearAttention).

        q = x W_q, or RMSNorm(x W_qa) W_qb,  c, κ = x W_kv,  c = RMSNorm(c)
        out = `mixers.latent_attention`(q, c, κ, U) W_out

    Decoding keeps c and κ of all tokens, kv_lora_rank + qk_rope_head_dim numbers for each, whatever the number of heads. On a mesh
    the heads are divided, and every device of "tensor" has the whole cache.

    Args:
      config: dim, dtype, output_scale and mla, and where it has no sizes, num_heads, head_dim and value_expansion.
      rngs: source of the initial values.

    Raises:
      ValueError: the shared key cannot be rotated.
    """

    undivided: ClassVar[str | None] = None  # see `mixers.check_divided`

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        given, sizes = config.mla, config.mla_sizes
        self.heads, self.latent_dim, own, self.shared_dim, values = sizes
        if given.rope_theta is not None and self.shared_dim % 2:
            raise ValueError(
                f"mixer 'mla': the shared key has {self.shared_dim} channels; give an even mla.qk_rope_head_dim."
            )
        self.theta, self.dtype = given.rope_theta, jnp.dtype(config.dtype)
        rank, queries = given.q_lora_rank, (self.heads, own + self.shared_dim)
        self.q_down = None if rank is None else Linear((config.dim, rank), ("embed", "rank"), rngs=rngs)
        self.q_norm = None if rank is None else RMSNorm((rank,), (None,), given.norm_eps)
        width, axis = (config.dim, "embed") if rank is None else (rank, "rank")
        self.q = Linear((width, *queries), (axis, "heads", None), rngs=rngs)
        self.down = Linear((config.dim, self.latent_dim + self.shared_dim), ("embed", "rank"), rngs=rngs)
        self.latent_norm = RMSNorm((self.latent_dim,), (None,), given.norm_eps)
        self.up = Linear((self.latent_dim, self.heads, own + values), ("rank", "heads", None), rngs=rngs)
        self.out = output_projection(config, rngs, inner=self.heads * values)

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """[batch, time, dim] → q, c, κ and U of `mixers.latent_attention`."""
        low = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        latent, key = jnp.split(self.down(x), (self.latent_dim,), axis=-1)
        return self.q(low), self.latent_norm(latent), key, self.up.kernel[...]

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. `max_segments` has no effect."""
        partition = mesh_partition(x.shape[0], self.heads, x.shape[1])
        y = latent_attention.latent_attention(
            *self._project(x), rope_theta=self.theta, segment_ids=segment_ids, partition=partition
        )
        return self.out(y.reshape(*y.shape[:2], -1))

    def init_state(self, batch_size: int, max_length: int | None = None) -> LatentCache:
        """An empty cache for `max_length` tokens.

        Raises:
          ValueError: max_length is None.
        """
        if max_length is None:
            raise ValueError(
                "mixer 'mla' keeps the latents of every token: max_length is None, must be the maximum number of tokens."
            )
        return latent_attention.init_cache(batch_size, max_length, self.latent_dim, self.shared_dim, self.dtype)

    def extend_layer(self, x: jax.Array, states: LatentCache, layer: jax.Array | None) -> tuple[jax.Array, LatentCache]:
        """`extend` in the cache of all layers. See `mixers.LayerwiseMixer`."""
        partition = mesh_partition(x.shape[0], self.heads, x.shape[1])
        y, states = latent_attention.extend(
            *self._project(x), states, rope_theta=self.theta, partition=partition, layer=layer
        )
        return self.out(y.reshape(*y.shape[:2], -1)), states
