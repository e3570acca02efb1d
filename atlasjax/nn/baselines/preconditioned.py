"""Preconditioned DeltaNet (arXiv 2604.21100): delta rules whose write keys are scaled by an estimate of the curvature."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from atlasjax import memory, rules
from atlasjax.mixers.curvature import CENTER, preconditioned_keys
from atlasjax.nn.baselines.gated_deltanet import GatedDeltaNetMixer
from atlasjax.nn.baselines.kda import ChannelDecayMixer
from atlasjax.nn.baselines.recurrent import MatrixMixer, RecurrentState, float32_product
from atlasjax.nn.baselines.step_sizes import decay, log_rates, step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import param


class PreconditionedState(NamedTuple):
    """The memory's state, and the curvature a, float32 [batch, heads, key_dim]."""

    memory: PyTree
    curvature: jax.Array

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


class WithCurvature(NamedTuple):
    """`Tokens.rest`: that of the mixer without curvature, and β^a and α^a, [batch, time, heads], float32."""

    rest: PyTree
    step_size: jax.Array
    retention: jax.Array


class Curvature(Module):
    """The gates β^a = σ(x W_β), α^a = exp(−exp(A_log) softplus(x W_a + dt_bias)), and the center c, initially −0.2.

    Args:
      dim: width of x.
      num_heads: number of curvatures.
      least: smallest initial rate exp(A_log); the largest is 16.
      rngs: source of the initial values.
    """

    def __init__(self, dim: int, num_heads: int, least: float, *, rngs: nnx.Rngs):
        self.gates = Linear((dim, 2, num_heads), ("embed", None, "heads"), rngs=rngs)  # β^a, decay
        self.A_log = param(log_rates(rngs, num_heads, least, 16.0), "heads")
        self.dt_bias = param(step_bias(rngs, num_heads), "heads")
        self.center = param(jnp.full(num_heads, CENTER, jnp.float32), "heads")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[batch, time, dim] → β^a and α^a, [batch, time, heads], float32."""
        logits = float32_product(x, self.gates)
        return jax.nn.sigmoid(logits[:, :, 0]), decay(logits[:, :, 1], self.A_log[...], self.dt_bias[...])


class PreconditionedMixer(MatrixMixer):
    """Curvature for a mixer of a delta rule: a base class before that of the mixer, whose rule has a read key.

    Consecutive heads of the memory share a curvature, of which there are as many as in `curvature`.
    """

    takes_caching: ClassVar[bool] = False  # a cache has memories, and their curvature would be lacking
    curvature: Curvature

    @property
    def undivided(self) -> str:
        """See `mixers.check_divided`."""
        return "the curvature of its keys is summed over the tokens of a sequence by each device"

    def init_state(self, batch_size: int, max_length: int | None = None) -> RecurrentState:
        inputs, memory = super().init_state(batch_size, max_length)
        heads = self.curvature.center[...].shape[0]
        return RecurrentState(
            inputs, PreconditionedState(memory, jnp.zeros((batch_size, heads, self.key_dim), jnp.float32))
        )

    def project(self, x, inputs, segment_ids):
        tokens, inputs = super().project(x, inputs, segment_ids)
        gates = tokens.gates._replace(removal_key=tokens.k)
        return tokens._replace(gates=gates, rest=WithCurvature(tokens.rest, *self.curvature(x))), inputs

    def recur(self, tokens, state, segment_ids, max_segments):
        memory, a = (None, None) if state is None else state
        _, step_size, retention = tokens.rest
        shared = self.num_heads // step_size.shape[2]
        keys, a = preconditioned_keys(
            tokens.k[:, :, ::shared], step_size, retention, self.curvature.center[...], state=a, segment_ids=segment_ids
        )
        tokens = tokens._replace(k=jnp.repeat(keys, shared, axis=2))
        y, memory = super().recur(tokens, memory, segment_ids, max_segments)
        return y, PreconditionedState(memory, a)

    def output(self, y, tokens):
        return super().output(y, tokens._replace(rest=tokens.rest.rest))


class PGDNMixer(PreconditionedMixer, GatedDeltaNetMixer):
    """Preconditioned Gated DeltaNet: Gated DeltaNet that writes at m ⊙ k, where m is the inverse of a curvature:

        a_t = α^a_t a_{t−1} + β^a_t k_t ⊙ k_t,  m_t = exp(−log(1.5) · r/(1 + |r|)),  r = log(a_t + 10⁻⁶) − c_h
        S̃_t = α_t S_{t−1},  S_t = S̃_t + β_t (v_t − S̃_t k_t)(m_t ⊙ k_t)ᵀ        y_t = S_t q_t

    Everything else is as in Gated DeltaNet; with `negative_eigenvalues` β_t k_tᵀ(m_t ⊙ k_t) is cut at 2 (`rules.pgdn`). β^a and
    α^a are gates like β and α, one of each for a head of keys (`Curvature`). In fla (`PrecondGatedDeltaNet`) values are twice as
    wide as keys (`value_expansion=2`).

    Args:
      config: as for `GatedDeltaNetMixer` but caching, with its sizes (`gated_deltanet`).
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rules.pgdn(), rngs=rngs)
        self.curvature = Curvature(config.dim, config.num_heads, 1e-3, rngs=rngs)


class PKDAMixer(PreconditionedMixer, ChannelDecayMixer):
    """Preconditioned Kimi Delta Attention: the same with a decay for each channel of the key, S̃_t = S_{t−1} Diag(α_t).

    Everything else is as in `KDAMixer`, except that heads of values that share a key share its β, and that dt_bias is initially
    zero. Each head of values has a curvature of its own. fla (`PrecondKDA`) has a bias in the output gate (`kda.gate_bias`).

    Args:
      config: as for `KDAMixer` but caching, with its sizes (`kda`).
      rngs: source of the initial values.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rules.pkda(), rngs=rngs)
        self.decay.dt_bias = param(jnp.zeros((self.num_heads, self.key_dim), jnp.float32), "heads", None)
        self.beta = Linear((config.dim, config.num_heads), ("embed", "heads"), rngs=rngs)
        self.curvature = Curvature(config.dim, self.num_heads, 1.0, rngs=rngs)

    def write(self, x, k, v, more):
        beta = self.largest_step * jax.nn.sigmoid(float32_product(x, self.beta))
        return v, memory.Gates(step_size=self.for_values(beta))
