"""Elastic Memory as a layer (arXiv 2602.11212): causal attention within blocks and to samples of a compressed history."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlasjax.mixers import elastic
from atlasjax.nn.attention import output_projection, require_plain_attention
from atlasjax.nn.cache_check import check_state
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear
from atlasjax.nn.module import Module

_SLOW_ORDER = 2048  # from this order on, building a block takes seconds
_NO_LIMIT = 2**31 - 1  # positions are int32


class BlockProjections(Module):
    """The projections of mixers with block attention: q, k, v = x W_in and the output projection W_out, without biases.

    Args:
      config: dim, num_heads, head_dim (even, with rotary positions), value_expansion, dtype, attention.rope_theta, output_scale.
      rngs: source of the initial values.

    Raises:
      ValueError: head_dim is odd, or the attention has a form that no layer of the model takes.
    """

    mixer: str  # name of the mixer, used in messages

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        require_plain_attention(config, self.mixer)
        heads, key_dim = config.num_heads, config.resolved_head_dim
        if key_dim % 2 and config.attention.rope_theta is not None:
            raise ValueError(
                f"ModelConfig: head_dim={key_dim} must be even for rotary positions in mixer {self.mixer!r}."
            )
        self.heads, self.key_dim, self.value_dim = heads, key_dim, config.value_dim
        self.theta, self.dtype = config.attention.rope_theta, jnp.dtype(config.dtype)
        self.inputs = Linear((config.dim, heads, 2 * key_dim + config.value_dim), ("embed", "heads", None), rngs=rngs)
        self.out = output_projection(config, rngs)

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = jnp.split(self.inputs(x), (self.key_dim, 2 * self.key_dim), axis=-1)
        return q, k, v

    def _output(self, y: jax.Array) -> jax.Array:
        return self.out(y.reshape(*y.shape[:2], -1))


class ElasticMixer(BlockProjections):
    """Block attention with an elastic memory, which adds no parameters to attention (E §2).

        q, k, v = x W_in;  out = `elastic.attention.attention`(q, k, v) W_out        RoPE within the block; no biases

    The banks of `elastic.banks` are constants: each compiled function has one copy for all layers. They are built, or read from
    the disk cache, when a model is first called with that number of blocks. The decoding state has a fixed size, but the bank has
    matrices for every block, so `init_state` needs max_length. No parameter depends on `config.elastic`, so a trained model can be
    rebuilt with another sampling, discretization or order.

    Args:
      config: as for `BlockProjections`, and elastic.
      rngs: source of the initial values.

    Raises:
      ValueError: as for `BlockProjections`.
    """

    mixer = "elastic"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.elastic = config.elastic
        self.block_size, self.rotate = config.elastic.block_size, config.elastic.rotate_memory_queries

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. Outputs for documents beyond max_segments are NaN."""
        y = elastic.attention.attention(
            *self._project(x), *self._matrices(x.shape[1]), segment_ids=segment_ids, max_segments=max_segments, **self._options()
        )  # fmt: skip
        return self._output(y)

    def init_state(self, batch_size: int, max_length: int | None = None) -> elastic.attention.ElasticState:
        """The state before the first token.

        Raises:
          ValueError: max_length is None.
        """
        if max_length is None:
            raise ValueError(
                "mixer 'elastic' has one matrix per block: max_length is None, must be the maximum number of tokens."
            )
        return self._empty_state(batch_size, max_length)

    def extend(
        self, x: jax.Array, state: elastic.attention.ElasticState
    ) -> tuple[jax.Array, elastic.attention.ElasticState]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state. Outputs beyond max_length are NaN."""
        check_state(self, state, elastic.attention.ElasticState)
        matrices = self._matrices(state.max_length)
        y, state = elastic.attention.extend(*self._project(x), state, *matrices, **self._options())
        return self._output(y), state

    def _matrices(self, max_length: int) -> tuple[elastic.Bank, np.ndarray | None]:
        return bank(self.elastic, max_length), reconstruction(self.elastic)

    def _empty_state(self, batch_size: int, max_length: int) -> elastic.attention.ElasticState:
        return elastic.attention.init_state(
            batch_size, max_length, self.block_size, self._matrices(1)[1], self.heads, self.key_dim, self.value_dim,
            self.dtype,
        )  # fmt: skip

    def _options(self) -> dict:
        return {"rope_theta": self.theta, "rotate_memory_queries": self.rotate}


class BlockMixer(ElasticMixer):
    """`ElasticMixer` without the memory: causal attention within blocks of `block_attention.block_size` tokens only.

    It is the baseline for "elastic", and serves as the local layers around it. The state holds one block. There is no maximum
    length.
    """

    mixer = "block_attention"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.block_size = config.block_attention.block_size

    def init_state(self, batch_size: int, max_length: int | None = None) -> elastic.attention.ElasticState:
        """The state before the first token. max_length has no effect."""
        return self._empty_state(batch_size, _NO_LIMIT)

    def _matrices(self, max_length: int) -> tuple[elastic.Bank, np.ndarray | None]:
        size = self.block_size
        return elastic.attention.no_bank(elastic.attention.blocks_needed(max_length, size), size), None


def bank(config: elastic.ElasticConfig, max_length: int) -> elastic.Bank:
    """The bank for a context of max_length tokens, from the cache or newly built. Slow builds are announced on stderr."""
    blocks = elastic.attention.blocks_needed(max_length, config.block_size)
    return elastic.banks.load(
        config.order, config.block_size, blocks, discretization=config.discretization, legacy_hippo=config.legacy_hippo,
        progress=_announce if config.order >= _SLOW_ORDER else None,
    )  # fmt: skip


def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def reconstruction(config: elastic.ElasticConfig) -> np.ndarray:
    """R for the configured sampling, float32 [samples, order]."""
    sampling: str | elastic.sampling.Sampling = config.sampling
    if config.alpha is not None:
        sampling = functools.partial(elastic.sampling.exponential, alpha=config.alpha)
    return elastic.sampling.sampled_reconstruction(config.order, sampling, config.samples, float(config.context))
