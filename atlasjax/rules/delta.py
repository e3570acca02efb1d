"""Delta rules: what a matrix memory has stored at a key is replaced, token by token."""

from atlasjax.memory import objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.bounds import Bound
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.rules.registry import register

# A delta rule may step past its target, up to a reflection (η‖k‖² = 2): that is how it tracks parities (Grazzi et al. 2025).
_REFLECTING = Bound(step=2.0)


@register("W_t = W_{t−1}(I − η k kᵀ) + η v kᵀ")
def delta_rule(chunk_size: int = 1) -> MemoryRule:
    """W_t = W_{t−1}(I − η_t k kᵀ) + η_t v kᵀ (DeltaNet; η is its β). Exact with the default chunk of one token.

    With bounds by default; `rules.delta_rule().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizers.GradientDescent(), retention=retention.Full(),
        chunk_size=chunk_size, bound=_REFLECTING,
    )  # fmt: skip


@register("W_t = W_{t−1}(I − δ k kᵀ) + δ v kᵀ, δ = β/(1 + β‖k‖²)")
def longhorn() -> MemoryRule:
    """W_t = W_{t−1}(I − δ_t k kᵀ) + δ_t v kᵀ, δ = β/(1 + β‖k‖²) (Longhorn, Liu et al. 2024, β per head). The gate is β."""
    return MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizers.Implicit(), retention=retention.Full(), chunk_size=1
    )


@register("W_t = W_{t−1} − Diag(δ)(W_{t−1} k − v) kᵀ, δ = β/(1 + β‖k‖²)")
def longhorn_channel() -> MemoryRule:
    """Longhorn with a β per channel of the value: row c of W is written with δ_c = β_c/(1 + β_c‖k‖²)."""
    return MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizers.Implicit(per_channel=True),
        retention=retention.Full(), chunk_size=1,
    )  # fmt: skip


@register("W_t = α W_{t−1}(I − η k kᵀ) + η v kᵀ")
def gated_delta_rule() -> MemoryRule:
    """W_t = α_t W_{t−1}(I − η_t k kᵀ) + η_t v kᵀ (Gated DeltaNet, Yang et al. 2024): decay first, then the delta rule.

    With bounds by default; `rules.gated_delta_rule().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizers.GradientDescent(),
        retention=retention.Scalar(decay_first=True), chunk_size=1, bound=_REFLECTING,
    )  # fmt: skip


@register("W_t = W_{t−1}(Diag(α) − κ̂ (a ⊙ κ̂)ᵀ) + v kᵀ")
def rwkv7() -> MemoryRule:
    """W_t = W_{t−1}(Diag(α_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v kᵀ (RWKV-7 as published, Peng et al. 2025).

    Gates: α per channel (`retention`), the removal key κ̂ (`removal_key`) and its rates a (`removal`); k is the replacement key.

    With bounds by default; `rules.rwkv7().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.Matrix(), objectives.RemoveAndReplace(), optimizer=optimizers.GradientDescent(),
        retention=retention.Channel(), chunk_size=1,
    )  # fmt: skip


@register("W_t = W_{t−1}(Diag(α) − η k kᵀ) + η v kᵀ")
def rwkv7_one_key() -> MemoryRule:
    """W_t = W_{t−1}(Diag(α_t) − η_t k kᵀ) + η_t v kᵀ: RWKV-7 with one key, as in A Table 1.

    With bounds by default; `rules.rwkv7_one_key().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizers.GradientDescent(), retention=retention.Channel(),
        chunk_size=1,
    )  # fmt: skip
