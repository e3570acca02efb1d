"""Deep memories of Test-Time Training (TTT), Titans and Miras."""

from atlasjax.memory import features as features_lib
from atlasjax.memory import objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.rules.registry import register


@register("M_t = M_{t−1} − η ∇")
def ttt_linear(chunk_size: int = 16) -> MemoryRule:
    """TTT-Linear (Sun et al. 2024): M(x) = x + LN(W x), ℓ2, gradient descent on mini-batches of `chunk_size`.

    fla: chunk_ttt_linear(q, k, v, w, b, eta) is another function: it learns a bias too, adds the residual after reading, and takes
    a query's step size for all tokens of its chunk.

    With bounds by default; `rules.ttt_linear().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.MLP(depth=1, norm=True), objectives.L2(), optimizer=optimizers.GradientDescent(),
        retention=retention.Full(), chunk_size=chunk_size,
    )  # fmt: skip


@register("M_t = M_{t−1} − η ∇")
def ttt_mlp(chunk_size: int = 16, expansion: int = 4) -> MemoryRule:
    """TTT-MLP (Sun et al. 2024): M(x) = x + LN(W1 σ(W2 x)), ℓ2, gradient descent on mini-batches of `chunk_size`.

    fla has no function for it.

    With bounds by default; `rules.ttt_mlp().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.MLP(depth=2, expansion=expansion, norm=True), objectives.L2(),
        optimizer=optimizers.GradientDescent(), retention=retention.Full(), chunk_size=chunk_size,
    )  # fmt: skip


@register("M_t = α M_{t−1} + S_t, S_t = θ S_{t−1} − η ∇")
def titans(
    chunk_size: int = 64, structure: structures.Structure = structures.MLP(),
    features: features_lib.Features = features_lib.Identity(),
) -> MemoryRule:  # fmt: skip
    """Titans (Behrouz et al. 2024): deep memory, ℓ2, momentum and weight decay, online (A Table 1).

    fla: chunk_momentum_delta_rule(q, k, v, log_alpha, log_mu, eta=eta, use_p_times_alpha=False), with η = eta and θ = exp(log_mu),
    is this rule with chunk_size=1 and a matrix; fla has no deep memory.

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


@register("W2_t = W2_{t−1} (α I − η k kᵀ) − η ∇, W1_t = α W1_{t−1} − η ∇")
def dgd(
    chunk_size: int = 16, structure: structures.Structure = structures.MLP(expansion=1),
    features: features_lib.Features = features_lib.Identity(),
) -> MemoryRule:  # fmt: skip
    """Delta gradient descent (HOPE; Nested Learning, NeurIPS 2025): gradient descent with weight decay that also forgets,
    in the matrices that read the key, what was stored along it. The memory is M(x) = x + W1 gelu(W2 x) by default.

    The loss is ½‖M(k) − v‖², half of the paper's: its gradient is half of theirs at the same η. fla has no function for it.

    With bounds by default; `rules.dgd().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structure, objectives.L2(), features, optimizers.GradientDescent(), retention.Delta(), chunk_size=chunk_size
    )


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
