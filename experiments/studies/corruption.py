"""Corruption of the local context (E §3.6, Table 7): keys and values of the last block replaced by noise, in trained models.

The memory is read before the last block is written, so it holds the clean text. E does not say which noise: here it is normal, with
the mean square of the keys, or values, that the head has in the block. All heads of a layer lose the same tokens; other layers and
sequences lose others.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import check
from atlasjax.nn import ModelConfig
from atlasjax.nn.baselines import MemorizingMixer
from atlasjax.nn.elastic import BlockMixer, BlockProjections, ElasticMixer


class Noise(BlockProjections):
    """Projections whose keys and values from `start` on are noise, each token with probability `rate`.

    Args:
      config, rngs: as for `BlockProjections`.
      rate: in [0, 1].
      start: position of the first token that may be replaced.

    Raises:
      ValueError: rate is outside [0, 1].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, rate: float, start: int):
        check.number("Noise", "rate", rate, least=0, most=1)
        super().__init__(config, rngs=rngs)
        self.rate, self.start = rate, start

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super()._project(x)
        # The input as a seed: each layer and each batch has its own noise, and a repetition the same.
        seed = jax.lax.bitcast_convert_type(jnp.sum(x, dtype=jnp.float32), jnp.uint32)
        choice, *keys = jax.random.split(jax.random.fold_in(jax.random.key(0), seed), 3)
        lost = jax.random.bernoulli(choice, self.rate, x.shape[:2]) & (jnp.arange(x.shape[1]) >= self.start)
        k, v = (self._replaced(y, lost, key) for y, key in zip((k, v), keys, strict=True))
        return q, k, v

    def _replaced(self, x: jax.Array, lost: jax.Array, key: jax.Array) -> jax.Array:
        size = jnp.sqrt(jnp.mean(x[:, self.start :] ** 2, axis=(1, 3), keepdims=True))
        return jnp.where(lost[:, :, None, None], size * jax.random.normal(key, x.shape, x.dtype), x)


class NoisyBlock(Noise, BlockMixer):
    """`BlockMixer` with noise."""


class NoisyElastic(Noise, ElasticMixer):
    """`ElasticMixer` with noise."""


class NoisyMemorizing(Noise, MemorizingMixer):
    """`MemorizingMixer` with noise."""


_NOISY: dict[str, type] = {"block_attention": NoisyBlock, "elastic": NoisyElastic, "memorizing": NoisyMemorizing}


def corrupted(config: ModelConfig, rate: float, start: int, layers: tuple[int, ...]) -> ModelConfig:
    """The model, for the same parameters, with noise in the given layers.

    Args:
      config: a model whose mixers in these layers attend within blocks.
      rate: share of tokens whose keys and values are noise.
      start: position of the last block.
      layers: places in the pattern of mixers.

    Raises:
      ValueError: a mixer cannot be corrupted.
    """
    for place in layers:
        check.choice("corrupted", f"mixer {place}", config.pattern[place], tuple(_NOISY))
    mixers: tuple[Any, ...] = tuple(_NOISY[name] if i in layers else name for i, name in enumerate(config.pattern))
    return dataclasses.replace(config, mixer=mixers, mixer_options={"rate": rate, "start": start})  # type: ignore[arg-type]
