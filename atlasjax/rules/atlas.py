"""ATLAS: Deep Linear Attention, the Omega rule, Muon in the memory, and memories on softmax attention's features."""

from atlasjax.memory import features as features_lib
from atlasjax.memory import objectives, optimizers, structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.softmax import SoftmaxRule
from atlasjax.rules.registry import register


@register("M_t = α M_{t−1} − η ∇")
def dla(
    chunk_size: int = 64, structure: structures.Structure = structures.MLP(),
    features: features_lib.Features = features_lib.Identity(),
) -> MemoryRule:  # fmt: skip
    """Deep linear attention: a deep memory under the dot-product loss (A §4; A Table 1's DLA).

    A Eq. 19 and Table 1 read φ(k), App. D.1 reads k. The default is k; `features` is φ.

    With bounds by default; `rules.dla().unbounded()` is the recurrence as published.
    """
    return MemoryRule(structure, objectives.DotProduct(), features, optimizers.GradientDescent(), chunk_size=chunk_size)


@register("W_t = α W_{t−1} + η Σ_{j<c} γ_j v_{t−j} k_{t−j}ᵀ")
def swla(
    chunk_size: int = 64, window: int = 4, structure: structures.Structure = structures.Matrix(),
    features: features_lib.Features = features_lib.Identity(),
) -> MemoryRule:  # fmt: skip
    """Sliding-window linear attention: the dot-product loss over the last `window` tokens (A §4.1, Eq. 20, App. D.2).

    A Eq. 20 and Table 1 read φ(k), App. D.2 reads k. The default is k; `features` is φ.
    """
    return MemoryRule(
        structure, objectives.DotProduct(), features, optimizers.GradientDescent(), window=window, chunk_size=chunk_size
    )


@register("M_t = α M_{t−1} − η Σ_{j<c} γ_j ∇_{t−j}")
def omeganet(
    chunk_size: int = 64,
    window: int = 4,
    structure: structures.Structure = structures.MLP(),
    features: features_lib.Features = features_lib.Polynomial(2),
) -> MemoryRule:
    """OmegaNet (A §3.2–3.3): ℓ2 over a window (the Omega rule) on polynomial features, gradient descent with weight decay.

    With bounds by default; `rules.omeganet().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structure, objectives.L2(), features, optimizers.GradientDescent(), window=window, chunk_size=chunk_size
    )


@register("M_t = α M_{t−1} + η NS(S_t), S_t = θ S_{t−1} − Σ_{j<c} γ_j ∇_{t−j}")
def atlas(
    chunk_size: int = 64,
    window: int = 4,
    structure: structures.Structure = structures.MLP(),
    features: features_lib.Features = features_lib.Polynomial(2),
    newton_schulz_steps: int = 5,
    newton_schulz_every: int = 1,
    schedule: str = "standard",
) -> MemoryRule:
    """Atlas (A §5, Eq. 32 and 57): the Omega rule on polynomial features with the Muon inner optimizer.

    With bounds by default; `rules.atlas().unbounded()` is the recurrence as published.
    """
    muon = optimizers.Muon(newton_schulz_steps, schedule, newton_schulz_every)
    return MemoryRule(structure, objectives.L2(), features, muon, window=window, chunk_size=chunk_size)


@register("M_t = α M_{t−1} + η NS(S_t), S_t = θ S_{t−1} − Σ_{j<c} γ_j ∇_{t−j}")
def atlas_plus_plus(
    chunk_size: int = 64,
    window: int = 4,
    features: features_lib.Features = features_lib.Polynomial(2),
    newton_schulz_steps: int = 5,
    newton_schulz_every: int = 1,
    schedule: str = "standard",
) -> MemoryRule:
    """Atlas++: Atlas with the gated memory of A Eq. 43.

    With bounds by default; `rules.atlas_plus_plus().unbounded()` is the recurrence as published.
    """
    return atlas(
        chunk_size, window, structures.GatedMLP(), features, newton_schulz_steps, newton_schulz_every, schedule
    )


@register("M_t = α M_{t−1} − η ∇, first layer Σ_i a_i κ(k_i, ·)")
def deep_transformer(
    chunk_size: int = 64, structure: structures.Matrix | structures.MLP = structures.MLP(), normalized: bool = True
) -> SoftmaxRule:
    """DeepTransformer (A §4): a deep memory on the infinite features of softmax attention, dot-product loss, all tokens cached."""
    return SoftmaxRule(structure, objectives.DotProduct(), normalized=normalized, chunk_size=chunk_size)


@register("M_t = α M_{t−1} − η ∇, first layer Σ_{i>t−w} a_i κ(k_i, ·)")
def swdt(
    chunk_size: int = 64,
    window: int = 1,
    cache_window: int = 256,
    structure: structures.Matrix | structures.MLP = structures.MLP(),
    normalized: bool = True,
) -> SoftmaxRule:
    """Sliding-window DeepTransformer (A §4): the same over the last `cache_window` tokens."""
    return SoftmaxRule(
        structure, objectives.DotProduct(), normalized=normalized, window=window, cache_window=cache_window,
        chunk_size=chunk_size,
    )  # fmt: skip


@register("M_t = α M_{t−1} − η Σ_{j<c} γ_j ∇_{t−j}, first layer Σ_i a_i κ(k_i, ·)")
def dot(
    chunk_size: int = 64,
    window: int = 4,
    structure: structures.Matrix | structures.MLP = structures.MLP(),
    cache_window: int | None = None,
    normalized: bool = True,
) -> SoftmaxRule:
    """DOT, the deep Omega transformer (A §4.3, Eq. 27–31): ℓ2 and the Omega rule on the infinite features.

    With bounds by default; `rules.dot().unbounded()` is the recurrence as published.
    """
    return SoftmaxRule(
        structure,
        objectives.L2(),
        normalized=normalized,
        window=window,
        cache_window=cache_window,
        chunk_size=chunk_size,
    )
