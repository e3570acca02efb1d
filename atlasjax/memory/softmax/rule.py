"""`SoftmaxRule`: how a `SoftmaxSpec` is initialized, scanned, stepped and read, by the modules of this package."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from atlasjax.memory.gates import Weights
from atlasjax.memory.softmax import init
from atlasjax.memory.softmax.read import cached_weights, read_cached, read_state, reference_read
from atlasjax.memory.softmax.reference import reference_scan
from atlasjax.memory.softmax.scan import xla_scan
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState
from atlasjax.memory.softmax.step import xla_step, xla_step_layer
from atlasjax.memory.softmax.suggested import start_scale, suggested_steps


class SoftmaxRule(SoftmaxSpec):
    """DeepTransformer, SWDT, DOT and variants (A §4, Eq. 17–31; SEMANTICS 2). Frozen and hashable, static under `jax.jit`.

    The recurrence is that of `memory.MemoryRule` with infinitely many features φ*, whose inner products are
    φ*(k)·φ*(x) = κ(k, x) = exp(scale · k·x), scale = 1/√key_dim. The matrix that reads φ* is a sum over the tokens written,
    h_t(x) = Σ_i a_i(t) κ(k_i, x). It is never formed, but stored as a cache of keys k_i and coefficients a_i. With `normalized`,
    the sum is divided by Z_t(x) = Σ_i ρ_i(t) κ(k_i, x), where ρ_i(t) = α_{i+1} … α_t. An empty cache reads 0/0 = 0.

        matrix memory   y_t = h_t(q_t)                            a_i: [value_dim]
        MLP memory      y_t = q_t + W1 σ(h_t(q_t))                a_i: [expansion · value_dim]; W1 starts at a learned value

    Token t descends on the window's losses at the memory of its chunk's start t'. A step on token i's loss changes only a_i:

        s_i ← θ_t s_i − η_t γ_{t,t−i} ∂ℓ_i/∂h_{t'}(k_i)           (no 1/Z in the write)
        a_i ← α_t a_i + s_i                                       W1 is updated like any weight matrix

    With α = η = γ = 1, a matrix memory and the dot-product loss, the normalized memory is softmax attention.
    By default `step_bound` makes the steps of losses with a target smaller; `rule.unbounded()` is the papers' recurrence.

    `memory.scan` writes out its backward pass, so it has no forward-mode derivatives (jvp, jacfwd).

    Attributes:
      structure: `Matrix()`, `MLP(depth=2)` without a norm, or another of two matrices of which only the last reads the features. An
        MLP's residual is x itself, so its key_dim = value_dim.
      objective: `DotProduct()` (DeepTransformer, SWDT), `L2()` (DOT), or any loss without a threshold.
      optimizer: `GradientDescent()` or `Momentum()`: what is linear in the gradient.
      retention: `Full()` or `Scalar()`: one decay, without a map.
      window: c ≥ 1, the number of tokens on whose loss every step descends; 1 is the online rule.
      cache_window: w ≥ c, the number of most recent tokens that the cache holds (SWDT). None means all. W1 is not windowed.
      normalized: whether to divide by Z.
      scale: factor > 0 of the scores k·x. None means 1/√key_dim, as in attention. For keys of unit length that is nearly the same
        weight for every token, e^{±1/√key_dim}; see `for_unit_keys`.
      chunk_size: b ≥ 1, as in `MemoryRule`. No effect for a matrix memory with the dot-product loss.
      step_bound: > 0, how far the tokens of a chunk may step together, to first order; 1 means onto their targets. It acts for a
        loss with a target (DOT), with Z. With momentum, θ is at most 1 − 1/32 and a write at most 1/32 of the step. None means
        that step sizes are the gates, as in the paper. docs/semantics.md, 2.5.

    Raises:
      ValueError: an unsupported choice, which the message names, or a window larger than the cache.
    """

    # The functions of this package, with the rule as their first argument.
    init_params, init_state, check_params = init.init_params, init.init_state, init.check_params
    scan_tokens, step_token, step_token_in_layer = xla_scan, xla_step, xla_step_layer
    read, reference_tokens, start_scale = read_state, reference_scan, start_scale

    def suggested_steps(
        self, key_dim: int, value_dim: int, forgetting: np.ndarray, momentum_decay: np.ndarray, window_weights: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:  # fmt: skip
        return suggested_steps(self, forgetting, momentum_decay, window_weights)

    def cached_weights(self, state: SoftmaxState) -> Weights:
        return cached_weights(state)

    def read_cached(
        self, dtype: jnp.dtype, params: SoftmaxParams, weights: Weights, q: Float[Array, "time key_dim"]
    ) -> Float[Array, "time value_dim"]:
        return read_cached(self, dtype, weights, q)

    def reference_read(
        self, params: SoftmaxParams, weights: Weights, x: Float[Array, " key_dim"]
    ) -> Float[Array, " value_dim"]:
        return reference_read(self, weights, x)
