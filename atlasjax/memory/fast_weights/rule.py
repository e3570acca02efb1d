"""`MemoryRule`: how a `MemorySpec` is initialized, scanned, stepped and read, by the modules of this package."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from atlasjax.memory.fast_weights import init
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.fast_weights.read import read_cached, read_mixed, read_state, residual
from atlasjax.memory.fast_weights.reference import read_weights, reference_scan
from atlasjax.memory.fast_weights.scan import xla_scan
from atlasjax.memory.fast_weights.sequence_parallel import scan_part
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState, soup
from atlasjax.memory.fast_weights.step import xla_step, xla_step_layer
from atlasjax.memory.fast_weights.suggested import has_steps_of_one_size, suggested_steps
from atlasjax.memory.gates import Weights
from atlasjax.memory.part_checks import check_parts
from atlasjax.memory.rule import ScanCall, Sizes
from atlasjax.memory.tokens import Tokens


class MemoryRule(MemorySpec):
    """A memory, its inner objective and how it is optimized. Frozen and hashable, static under `jax.jit`.

    For every token t (SEMANTICS 1; A §3.2–3.3, §5):

        g_t = Σ_{j<c} γ_{t,j} ∇ℓ(M_{t'}; φ(k_{t−j}), v_{t−j})        M_{t'}: the memory at the start of t's chunk
        S_t = θ_t S_{t−1} − η_t g_t
        M_t = α_t M_{t−1} + S_t                                       Muon: S_t = θ_t S_{t−1} − g_t, M_t = α_t M_{t−1} + η_t NS(S_t)
        y_t = M_t(φ(q_t))

    This is the papers' recurrence, and that of `rule.unbounded()`. By default `bound` makes η_t and θ_t smaller where a step would
    pass its target (SEMANTICS 1.12), so that the memory cannot diverge.

    Attributes:
      structure: the memory M: `Matrix`, `MLP`, `PlainMLP`, `GatedMLP` or `SwiGLU`. This and the next four may also be
        user-defined (docs/own_rule.md).
      objective: the inner loss ℓ: `L2`, `DotProduct`, `Lp`, `Huber` or `RemoveAndReplace`.
      features: the feature map φ of keys and queries: `Identity`, `Polynomial`, `Powers` or `TensorSketch`.
      optimizer: `GradientDescent`, `Implicit`, `Momentum` or `Muon`.
      retention: `Full`, `Scalar`, `Channel`, `KL` or `Lq`.
      window: c ≥ 1, the number of most recent tokens on whose loss every step descends (the Omega rule). 1 is the online rule.
      chunk_size: b ≥ 1, part of the model: gradients are taken at the memory at the chunk's start. 1 is exact online learning. No
        effect for a matrix memory with the dot-product loss and without Muon.
      bound: bounds that keep the memory from diverging (`bounds.Bound`). None means no bounds, as in the papers.

    Raises:
      ValueError: incompatible choices. The message names both.
    """

    def soup(self, states: Sequence[MemoryState], weights: Float[Array, " states"]) -> MemoryState:
        return soup(states, weights)

    def init_params(self, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int) -> MemoryParams:
        return init.init_params(self, key, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)

    def init_state(self, params: MemoryParams, *, batch_size: int, max_length: int | None = None) -> MemoryState:
        return init.init_state(self, params, batch_size=batch_size, max_length=max_length)

    def check_params(self, params: MemoryParams, where: str) -> None:
        init.check_params(self, params, where)

    def scan_tokens(
        self,
        params: MemoryParams,
        state: MemoryState | None,
        tokens: Tokens,
        max_segments: int | None,
        lengths: Int[Array, " batch"] | None,
        soup: Soup | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], MemoryState]:
        return xla_scan(self, params, state, tokens, max_segments, lengths=lengths, soup=soup)

    def scan_tokens_part(
        self,
        axes: tuple[str, ...],
        run: ScanCall[MemoryParams, MemoryState],
        params: MemoryParams,
        state: MemoryState | None,
        tokens: Tokens,
    ) -> tuple[Float[Array, "batch time heads value_dim"], MemoryState]:
        return scan_part(self, axes, run, params, state, tokens)

    def step_token(
        self, params: MemoryParams, state: MemoryState, tokens: Tokens, soup: Soup | None = None
    ) -> tuple[Float[Array, "batch heads value_dim"], MemoryState]:
        return xla_step(self, params, state, tokens, soup=soup)

    def step_token_in_layer(
        self, params: MemoryParams, states: MemoryState, layer: Int[Array, ""], tokens: Tokens
    ) -> tuple[Float[Array, "batch heads value_dim"], MemoryState]:
        return xla_step_layer(self, params, states, layer, tokens)

    def read(
        self, params: MemoryParams, state: MemoryState, q: Float[Array, "batch time heads key_dim"]
    ) -> Float[Array, "batch time heads value_dim"]:
        return read_state(self, params, state, q)

    def reference_tokens(
        self, params: MemoryParams, state: MemoryState | None, tokens: Tokens
    ) -> tuple[Float[Array, "batch time heads value_dim"], MemoryState]:
        return reference_scan(self, params, state, tokens)

    def sizes(self, params: MemoryParams) -> Sizes:
        outermost = next(iter(self.structure.weight_shapes(1, 1)))
        num_heads, value_dim, _ = params.weights[outermost].shape
        return Sizes(num_heads, init.infer_key_dim(self, params), value_dim)

    @property
    def forgets_fast(self) -> bool:
        # Steps of fixed size and writes to a matrix do not need a gradient that scales with the memory.
        return (has_steps_of_one_size(self) or self.structure.is_matrix) and not self.retention.has_map

    def suggested_steps(
        self,
        key_dim: int,
        value_dim: int,
        forgetting: np.ndarray,
        momentum_decay: np.ndarray,
        window_weights: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:
        check_parts(self, key_dim, value_dim)  # a model asks for them before it creates the parameters
        return suggested_steps(self, key_dim, value_dim, forgetting, momentum_decay, window_weights, similar_keys)

    def read_cached(
        self, dtype: jnp.dtype, params: MemoryParams, weights: Weights, q: Float[Array, "time key_dim"]
    ) -> Float[Array, "time value_dim"]:
        return read_cached(self, dtype, params, weights, q)

    def read_mixed(
        self,
        dtype: jnp.dtype,
        params: MemoryParams,
        weights: Weights,
        q: Float[Array, "time key_dim"],
        gamma: Float[Array, "time memories"],
    ) -> Float[Array, "time value_dim"]:
        """`read_cached` for a soup of several memories of one head: weights [memories, out, in]."""
        return read_mixed(self, dtype, params, weights, q, gamma)

    def reference_read(
        self, params: MemoryParams, weights: Weights, x: Float[Array, " key_dim"]
    ) -> Float[Array, " value_dim"]:
        return read_weights(self, params, weights, x)

    def residual(self, params: MemoryParams, q: Float[Array, "... key_dim"]) -> Float[Array, "... value_dim"] | None:
        return residual(self, params, q)
