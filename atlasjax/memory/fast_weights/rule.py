"""`MemoryRule`: how a `MemorySpec` is initialized, scanned, stepped and read, by the modules of this package."""

import numpy as np

from atlasjax.memory.fast_weights import init
from atlasjax.memory.fast_weights.read import read_cached, read_mixed, read_state, residual
from atlasjax.memory.fast_weights.reference import read_weights, reference_scan
from atlasjax.memory.fast_weights.scan import xla_scan
from atlasjax.memory.fast_weights.sequence_parallel import scan_part
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, soup
from atlasjax.memory.fast_weights.step import xla_step, xla_step_layer
from atlasjax.memory.fast_weights.suggested import has_steps_of_one_size, suggested_steps
from atlasjax.memory.part_checks import check_parts
from atlasjax.memory.rule import Sizes


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

    # The functions of this package, with the rule as their first argument.
    init_params, init_state, check_params = init.init_params, init.init_state, init.check_params
    scan_tokens, scan_tokens_part, reference_tokens = xla_scan, scan_part, reference_scan
    step_token, step_token_in_layer = xla_step, xla_step_layer
    read, reference_read, residual = read_state, read_weights, residual
    read_cached, read_mixed = read_cached, read_mixed
    soup = staticmethod(soup)

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
