"""Named memory rules: the rows of A Table 1 and related ones.

Each function takes settings (`chunk_size`, `window`, …) and returns a `MemoryRule` or a `SoftmaxRule`. `register` makes it
available by name to language models, presets, tables and experiments. A rule of your own can be registered in the same way.

The docstrings give the recurrences of the papers. By default a rule also has bounds, which keep its memory from diverging
(`memory.Bound`, docs/semantics.md 1.12): they make steps smaller and limit weights. `rule.unbounded()` has none.
"""

from collections.abc import Callable
from typing import TypeVar

from atlasjax.memory import features as features_lib
from atlasjax.memory import objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.bounds import Bound
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.softmax import SoftmaxRule

Rule = MemoryRule | SoftmaxRule
Factory = TypeVar("Factory", bound=Callable[..., Rule])

REGISTRY: dict[str, Callable[..., Rule]] = {}
WRITES: dict[str, str] = {}  # how each rule writes its memory, in the paper's symbols: the last column of the table


def register(write: str) -> Callable[[Factory], Factory]:
    """Decorator: registers a function that returns a rule, under the function's name.

    Args:
      write: how the memory is written. W is a matrix memory, M any memory, ∇ its inner gradient at M_{t'}.

    Raises:
      ValueError: another function is registered under this name.
      TypeError: `write` is missing.
    """
    if not isinstance(write, str):
        raise TypeError(f'rules.register: write is {write!r}; it should be text, as in @rules.register("W_t = …").')

    def add(factory: Factory) -> Factory:
        name = factory.__name__
        if name in REGISTRY and REGISTRY[name].__module__ != factory.__module__:
            raise ValueError(f"rules.register: {name!r} is already the name of {REGISTRY[name].__module__}.{name}.")
        REGISTRY[name], WRITES[name] = factory, write
        return factory

    return add


# A delta rule may step past its target, up to a reflection (η‖k‖² = 2): that is how it tracks parities (Grazzi et al. 2025).
_REFLECTING = Bound(step=2.0)


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


@register("M_t = M_{t−1} − η ∇")
def ttt_linear(chunk_size: int = 16) -> MemoryRule:
    """TTT-Linear (Sun et al. 2024): M(x) = x + LN(W x), ℓ2, gradient descent on mini-batches of `chunk_size`.

    With bounds by default; `rules.ttt_linear().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.MLP(depth=1, norm=True), objectives.L2(), optimizer=optimizers.GradientDescent(),
        retention=retention.Full(), chunk_size=chunk_size,
    )  # fmt: skip


@register("M_t = M_{t−1} − η ∇")
def ttt_mlp(chunk_size: int = 16, expansion: int = 4) -> MemoryRule:
    """TTT-MLP (Sun et al. 2024): M(x) = x + LN(W1 σ(W2 x)), ℓ2, gradient descent on mini-batches of `chunk_size`.

    With bounds by default; `rules.ttt_mlp().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.MLP(depth=2, expansion=expansion, norm=True), objectives.L2(),
        optimizer=optimizers.GradientDescent(), retention=retention.Full(), chunk_size=chunk_size,
    )  # fmt: skip


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


@register("M_t = α M_{t−1} + S_t, S_t = θ S_{t−1} − η ∇")
def titans(
    chunk_size: int = 64, structure: structures.Structure = structures.MLP(),
    features: features_lib.Features = features_lib.Identity(),
) -> MemoryRule:  # fmt: skip
    """Titans (Behrouz et al. 2024): deep memory, ℓ2, momentum and weight decay, online (A Table 1).

    With bounds by default; `rules.titans().unbounded()` is the recurrence as published.
    """
    return MemoryRule(structure, objectives.L2(), features, optimizers.Momentum(), chunk_size=chunk_size)


@register("M_t = α M_{t−1} − η ∇")
def titans_no_momentum(
    chunk_size: int = 64, structure: structures.Structure = structures.MLP(),
    features: features_lib.Features = features_lib.Identity(),
) -> MemoryRule:  # fmt: skip
    """Titans without momentum: gradient descent with weight decay.

    With bounds by default; `rules.titans_no_momentum().unbounded()` is the recurrence as published.
    """
    return MemoryRule(structure, objectives.L2(), features, optimizers.GradientDescent(), chunk_size=chunk_size)


@register("A_t = α A_{t−1} − η ∇, M_t = sign(A_t) |A_t|^{q−1} / ‖A_t‖_q^{q−2}")
def moneta(
    chunk_size: int = 64, p: float = 3.0, q: float = 4.0, structure: structures.Structure = structures.MLP()
) -> MemoryRule:
    """Moneta (Behrouz et al. 2025, "It's all connected"): the ℓp loss with the ℓq retention map; q = 2 is A Table 1's row.

    A_t = α_t A_{t−1} − η_t ∇ℓ_p(M_{t'}; k, v),  M_t = sign(A_t) |A_t|^{q−1} / ‖A_t‖_q^{q−2}. The published formula omits the
    power; see `retention.Lq`.

    With bounds by default; `rules.moneta().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structure, objectives.Lp(p), optimizer=optimizers.GradientDescent(), chunk_size=chunk_size,
        retention=retention.Scalar() if q == 2 else retention.Lq(q),
    )  # fmt: skip


@register("M_t = α M_{t−1} − η ∇")
def yaad(
    chunk_size: int = 64, structure: structures.Structure = structures.MLP(),
    features: features_lib.Features = features_lib.Identity(),
) -> MemoryRule:  # fmt: skip
    """Yaad (Behrouz et al. 2025): the Huber loss with a threshold per token, gradient descent with weight decay.

    With bounds by default; `rules.yaad().unbounded()` is the recurrence as published.
    """
    return MemoryRule(structure, objectives.Huber(), features, optimizers.GradientDescent(), chunk_size=chunk_size)


@register("M_t = softmax(α log M_{t−1} − η ∇)")
def memora(chunk_size: int = 64, structure: structures.Structure = structures.MLP()) -> MemoryRule:
    """Memora (Behrouz et al. 2025): ℓ2 with the KL retention, M_t = softmax over rows of (α_t log M_{t−1} − η_t ∇ℓ).

    With bounds by default; `rules.memora().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structure, objectives.L2(), optimizer=optimizers.GradientDescent(), retention=retention.KL(),
        chunk_size=chunk_size,
    )  # fmt: skip


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
