"""Linear attention: rules of the dot-product loss whose memory is a matrix."""

from dataclasses import replace

from atlasjax import check
from atlasjax.memory import NormalizedRule, objectives, optimizers, retention, structures
from atlasjax.memory import features as features_lib
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.rules.registry import register


@register("W_t = W_{t−1} + η v kᵀ")
def linear_attention(chunk_size: int = 64) -> MemoryRule:
    """W_t = W_{t−1} + η_t v kᵀ (Katharopoulos et al. 2020; η = 1). fla: chunk_linear_attn(q, k, v, normalize=False)."""
    return MemoryRule(
        structures.Matrix(), objectives.DotProduct(), optimizer=optimizers.GradientDescent(), retention=retention.Full(),
        chunk_size=chunk_size,
    )  # fmt: skip


def normalized_linear_attention(
    chunk_size: int = 64, features: features_lib.Features = features_lib.EluPlusOne(), eps: float = 1e-6
) -> NormalizedRule:
    """y_t = Σ_i η_i (φ(q_t)·φ(k_i)) v_i / Σ_i η_i φ(q_t)·φ(k_i) (Katharopoulos et al. 2020; A Eq. 2, M Eq. 2; η = 1).

    features, eps: see `memory.NormalizedRule`. PolySketchFormer's: `features.Homogeneous(p)` with an even degree p.

    In a model: MemoryConfig(rule="atlasjax.rules:normalized_linear_attention"). With a decay: a NormalizedRule around `retnet`.
    """
    return NormalizedRule(replace(linear_attention(chunk_size), features=features), eps)


@register("W_t = α W_{t−1} + η v kᵀ")
def retnet(chunk_size: int = 64) -> MemoryRule:
    """W_t = α_t W_{t−1} + η_t v kᵀ (RetNet, Sun et al. 2023, with a constant α for each head; Mamba-2 with a gated one).

    fla: chunk_retention(q, k, v), whose α are 1 − 2^{−5−h}, and chunk_simple_gla(q, k, v, g) with g = log α; η = 1.
    """
    return MemoryRule(
        structures.Matrix(), objectives.DotProduct(), optimizer=optimizers.GradientDescent(), chunk_size=chunk_size
    )


@register("W_t = W_{t−1} Diag(α) + η v kᵀ")
def gla(chunk_size: int = 64) -> MemoryRule:
    """W_t = W_{t−1} Diag(α_t) + η_t v kᵀ, α per channel of the key (gated linear attention, Yang et al. 2024).

    fla: chunk_gla(q, k, v, g), with g = log α and η = 1.
    """
    return MemoryRule(
        structures.Matrix(), objectives.DotProduct(), optimizer=optimizers.GradientDescent(),
        retention=retention.Channel(), chunk_size=chunk_size,
    )  # fmt: skip


@register("W_t = W_{t−1} + η v φ(k)ᵀ")
def polysketch(chunk_size: int = 64, features: features_lib.Features = features_lib.Polynomial(2)) -> MemoryRule:
    """W_t = W_{t−1} + η_t v φ(k)ᵀ with polynomial features, exact or sketched (PolySketchFormer, Kacham et al. 2024).

    Not normalized: a read is not divided by φ(q)·Σφ(k).
    """
    return MemoryRule(
        structures.Matrix(), objectives.DotProduct(), features, optimizers.GradientDescent(), retention.Full(),
        chunk_size=chunk_size,
    )  # fmt: skip


@register("W_t = α W_{t−1} + η (γ_0 v_t k_tᵀ + γ_1 v_{t−1} k_{t−1}ᵀ)")
def mamba3(chunk_size: int = 64, rank: int = 1) -> MemoryRule:
    """The exponential-trapezoidal recurrence of Mamba-3 (Lahoti et al. 2026, arXiv 2603.15569): `swla` with a window of rank + 1.

        W_t = α_t W_{t−1} + Δ_t (λ_t v_t k_tᵀ + (1 − λ_t) α_t v_{t−1} k_{t−1}ᵀ)

    Gates: retention α = exp(Δ A), step_size Δ ≥ 0, and window_weights (λ, (1 − λ) α), which are in [0, 1] however large Δ is. With
    λ = 1 it is `retnet`, the recurrence of Mamba-2. Keys and queries are given rotated. A token of rank R is R tokens of this rule
    (`atlasjax.mixers.mamba3`). The first one has α, and (λ, (1 − λ) α, …, (1 − λ) α) as weights: its window reaches back over all R
    pairs of the token before. The others have α = 1 and (λ, 0, …, 0).

    Raises:
      ValueError: rank is not an integer ≥ 1.
    """
    check.integer("rules.mamba3", "rank", rank)
    return MemoryRule(
        structures.Matrix(), objectives.DotProduct(), optimizer=optimizers.GradientDescent(), window=rank + 1,
        chunk_size=chunk_size,
    )  # fmt: skip
