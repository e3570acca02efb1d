"""Linear attention: rules of the dot-product loss whose memory is a matrix."""

from atlasjax.memory import features as features_lib
from atlasjax.memory import objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.rules.registry import register


@register("W_t = W_{t−1} + η v kᵀ")
def linear_attention(chunk_size: int = 64) -> MemoryRule:
    """W_t = W_{t−1} + η_t v kᵀ (Katharopoulos et al. 2020; η = 1)."""
    return MemoryRule(
        structures.Matrix(), objectives.DotProduct(), optimizer=optimizers.GradientDescent(), retention=retention.Full(),
        chunk_size=chunk_size,
    )  # fmt: skip


@register("W_t = α W_{t−1} + η v kᵀ")
def retnet(chunk_size: int = 64) -> MemoryRule:
    """W_t = α_t W_{t−1} + η_t v kᵀ (RetNet, Sun et al. 2023, with a constant α for each head; Mamba-2 with a gated one)."""
    return MemoryRule(
        structures.Matrix(), objectives.DotProduct(), optimizer=optimizers.GradientDescent(), chunk_size=chunk_size
    )


@register("W_t = W_{t−1} Diag(α) + η v kᵀ")
def gla(chunk_size: int = 64) -> MemoryRule:
    """W_t = W_{t−1} Diag(α_t) + η_t v kᵀ, α per channel of the key (gated linear attention, Yang et al. 2024)."""
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
