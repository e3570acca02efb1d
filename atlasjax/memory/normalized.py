"""`NormalizedRule`: linear attention whose reads are divided by the sum of their weights (A Eq. 2, M Eq. 2)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from atlasjax import check
from atlasjax.memory.axes import structures
from atlasjax.memory.family import FamilyRule
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Weights
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Sizes
from atlasjax.memory.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class NormalizedRule(FamilyRule[MemoryParams, MemoryState]):
    """Normalized linear attention (Katharopoulos et al. 2020; A Eq. 2, M Eq. 2) around a rule of sums. Frozen and hashable.

        G_t = α_t G_{t−1} + η_t v_t φ(k_t)ᵀ,   G_0 = eps W_0        [value_dim, D]
        z_t = α_t z_{t−1} + η_t φ(k_t),        z_0 = 0              [D]
        y_t = G_t φ(q_t) / (max(z_t · φ(q_t), 0) + eps)

    α as in `rule`: none, one number for each head, or one for each channel. With φ(q)·φ(k) ≥ 0 the denominator is at least eps, and
    a read is an average of the values and of W_0 φ(q): no entry is larger than the largest of these. W_0 weighs eps, so that a
    fresh memory reads W_0 φ(q), like that of every other rule. Only the ratio of step sizes matters while they are far above eps.

    The state is that of `rule` for values with one further channel, which is always 1: its row of the matrix is z. So whole
    sequences, streams and packed segments are those of linear attention.

    Attributes:
      rule: `rules.linear_attention`, `retnet` or `gla` with features of which `is_positive` is claimed.
      eps: > 0, added to the denominator.

    Raises:
      ValueError: the rule is not a sum of outer products, or its features do not claim `is_positive`.
    """

    structure: ClassVar[structures.Structure] = structures.Matrix()

    rule: MemoryRule
    eps: float = 1e-6

    def __post_init__(self) -> None:
        rule = self.rule
        check.instance("NormalizedRule", "rule", rule, MemoryRule)
        sums = rule.is_linear and rule.has_constant_gradient and rule.window == 1
        if not sums or any(channels is not None for channels in self._steps_of(rule)):
            raise ValueError(
                f"NormalizedRule: rule={rule!r} must be a sum of outer products (a matrix, the dot-product loss, gradient "
                "descent with one step size for each head, window=1), such as rules.linear_attention()."
            )
        if not rule.features.is_positive:
            raise ValueError(
                f"NormalizedRule: features={rule.features!r} should have φ(q)·φ(k) ≥ 0 for all q and k, and claim it "
                "(is_positive), such as features.EluPlusOne(): otherwise denominators may be zero."
            )
        check.number("NormalizedRule", "eps", self.eps, above=0)

    @staticmethod
    def _steps_of(rule: MemoryRule) -> list[int | None]:
        return [channels for name, channels in rule.gate_channels(2, 3).items() if name == "step_size"]

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        return self.rule.gate_channels(key_dim, value_dim)

    def sizes(self, params: MemoryParams) -> Sizes:
        return self.rule.sizes(params)

    @property
    def reads_are_linear(self) -> bool:
        return False

    @property
    def forgets_fast(self) -> bool:
        return self.rule.forgets_fast

    def suggested_steps(
        self, key_dim: int, value_dim: int, forgetting: np.ndarray, momentum_decay: np.ndarray, window_weights: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:  # fmt: skip
        """A step size is a token's weight in an average: it starts at 1/2 and ends at 1."""
        return np.full_like(forgetting, 0.5), 1.0

    def init_params(self, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int) -> MemoryParams:
        return self.rule.init_params(key, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)

    def check_params(self, params: MemoryParams, where: str) -> None:
        self.rule.check_params(params, where)

    def init_state(self, params: MemoryParams, *, batch_size: int, max_length: int | None = None) -> MemoryState:
        """`MemoryState` of G and, as its last row, z."""
        return self.rule.init_state(self._with_sum(params), batch_size=batch_size)

    def scan_tokens(
        self,
        params: MemoryParams,
        state: MemoryState | None,
        tokens: Tokens,
        max_segments: int | None,
        lengths: Int[Array, " batch"] | None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], MemoryState]:
        y, state = self.rule.scan_tokens(self._with_sum(params), state, _with_one(tokens), max_segments, lengths)
        return self._divided(y), state

    def step_token(
        self, params: MemoryParams, state: MemoryState, tokens: Tokens
    ) -> tuple[Float[Array, "batch heads value_dim"], MemoryState]:
        y, state = self.rule.step_token(self._with_sum(params), state, _with_one(tokens))
        return self._divided(y), state

    def step_token_in_layer(
        self, params: MemoryParams, states: MemoryState, layer: Int[Array, ""], tokens: Tokens
    ) -> tuple[Float[Array, "batch heads value_dim"], MemoryState]:
        y, states = self.rule.step_token_in_layer(self._with_sum(params), states, layer, _with_one(tokens))
        return self._divided(y), states

    def read(
        self, params: MemoryParams, state: MemoryState, q: Float[Array, "batch time heads key_dim"]
    ) -> Float[Array, "batch time heads value_dim"]:
        return self._divided(self.rule.read(self._with_sum(params), state, q))

    def reference_tokens(
        self, params: MemoryParams, state: MemoryState | None, tokens: Tokens
    ) -> tuple[Float[Array, "batch time heads value_dim"], MemoryState]:
        y, state = self.rule.reference_tokens(self._with_sum(params), state, _with_one(tokens))
        return self._divided(y), state

    def cached_weights(self, state: MemoryState) -> Weights:
        return self.rule.cached_weights(state)

    def read_cached(
        self, dtype: jnp.dtype, params: MemoryParams, weights: Weights, q: Float[Array, "time key_dim"]
    ) -> Float[Array, "time value_dim"]:
        return self._divided(self.rule.read_cached(dtype, params, weights, q))

    def _with_sum(self, params: MemoryParams) -> MemoryParams:
        """The parameters of `rule`, for values with one more channel: G_0 above z_0."""
        padded = lambda w: jnp.pad(self.eps * w, [(0, 0)] * (w.ndim - 2) + [(0, 1), (0, 0)])
        return params._replace(weights={name: padded(w) for name, w in params.weights.items()})

    def _divided(self, y: Float[Array, "*tokens value_dim+1"]) -> Float[Array, "*tokens value_dim"]:
        wide = y.astype(wide_dtype(y.dtype))
        # Rounding can bring a sum of weights near zero below it.
        return (wide[..., :-1] / (jax.nn.relu(wide[..., -1:]) + self.eps)).astype(y.dtype)


def _with_one(tokens: Tokens) -> Tokens:
    return tokens._replace(v=jnp.concatenate([tokens.v, jnp.ones_like(tokens.v[..., :1])], axis=-1))
