"""Delta rules: what a matrix memory has stored at a key is replaced, token by token."""

from atlasjax.memory import objectives, optimizers, retention, structures
from atlasjax.memory.bounds import Bound
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.rules.registry import register

# A delta rule may step past its target, up to a reflection (η‖k‖² = 2): that is how it tracks parities (Grazzi et al. 2025).
_REFLECTING = Bound(step=2.0)


@register("W_t = W_{t−1}(I − η k kᵀ) + η v kᵀ")
def delta_rule(chunk_size: int = 1) -> MemoryRule:
    """W_t = W_{t−1}(I − η_t k kᵀ) + η_t v kᵀ (DeltaNet; η is its β). Exact with the default chunk of one token.

    fla: chunk_delta_rule(q, k, v, beta).

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

    fla: chunk_gated_delta_rule(q, k, v, g, beta), with g = log α and β = η.

    With bounds by default; `rules.gated_delta_rule().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizers.GradientDescent(),
        retention=retention.Scalar(decay_first=True), chunk_size=1, bound=_REFLECTING,
    )  # fmt: skip


@register("W_t = W̃(I − η k kᵀ) + η v kᵀ, W̃ = W_{t−1} Diag(α)")
def kda() -> MemoryRule:
    """W_t = W̃(I − η_t k kᵀ) + η_t v kᵀ, W̃ = W_{t−1} Diag(α_t) (Kimi Delta Attention, arXiv 2510.26692; η is its β).

    The decay, one for each channel of the key, comes first: the gradient is taken at the decayed memory. fla:
    chunk_kda(q, k, v, g, beta), with g = log α [batch, time, heads, key_dim] and queries that it scales by key_dim^{−1/2}.

    With bounds by default; `rules.kda().unbounded()` is the recurrence as published.
    """
    return MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizers.GradientDescent(),
        retention=retention.Channel(decay_first=True), chunk_size=1, bound=_REFLECTING,
    )  # fmt: skip


@register("S_t = θ S_{t−1} − η (α W_{t−1} k − v) kᵀ, W_t = α W_{t−1} + β S_t")
def momentum_delta(decay_first: bool = True) -> MemoryRule:
    """S_t = θ_t S_{t−1} − η_t (α_t W_{t−1} k − v) kᵀ, W_t = α_t W_{t−1} + β_t S_t (Momentum DeltaNet, arXiv:2605.05838).

    Gates: α (`retention`), η (`step_size`), θ (`momentum_decay`; the paper's μ) and β (`write_size`). fla's recurrence
    (`recurrent_momentum_delta_rule_ref`) keeps M = −S: chunk_momentum_delta_rule(q, k, v, log α, log θ, p=k, β, η, scale=1).

    There is no bound: none would leave published gates as they are. With momentum `Bound.step` counts every write `horizon` times,
    and takes off what momentum has still to add, while the published η is about 1 (docs/semantics.md 1.12).

    Args:
      decay_first: whether the error is taken at α_t W_{t−1}, as published (fla: use_p_times_alpha), or at W_{t−1}.
    """
    return MemoryRule(
        structures.Matrix(), objectives.L2(), optimizer=optimizers.Momentum(write_gate=True),
        retention=retention.Scalar(decay_first=decay_first), chunk_size=1, bound=None,
    )  # fmt: skip


@register("W_t = W_{t−1}(Diag(α) − κ̂ (a ⊙ κ̂)ᵀ) + v kᵀ")
def rwkv7() -> MemoryRule:
    """W_t = W_{t−1}(Diag(α_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v kᵀ (RWKV-7 as published, Peng et al. 2025).

    Gates: α per channel (`retention`), the removal key κ̂ (`removal_key`) and its rates a (`removal`); k is the replacement key.
    fla: chunk_rwkv7(r, w, k, v, a, b), with w = log α, a = −κ̂ and b = κ̂ ⊙ a, and queries r that are not scaled.

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


@register("W_t = W̃ + η (v − W̃ r) kᵀ, W̃ = W_{t−1} Diag(α), r = b ⊙ k")
def gdn2() -> MemoryRule:
    """W_t = W̃_t + η_t (v_t − W̃_t r_t) k_tᵀ, W̃_t = W_{t−1} Diag(α_t): Gated DeltaNet-2 (arXiv 2605.22791).

    Gates: α per channel (`retention`), the read key r = b ⊙ k with erasing rates b ∈ [0, 1] for each channel (`removal_key`), and η
    (`step_size`), which is 1. Its values are w ⊙ v, with the writing rates w ∈ [0, 1] for each channel of the value. With b = β and
    w = β it is `kda`. fla: chunk_gdn2(q, k, v, g, b, w), with g = log α.

    With bounds by default, η rᵀk ≤ 2: up to a reflection. `rules.gdn2().unbounded()` is the recurrence as published.
    """
    return _with_read_key(retention.Channel(decay_first=True))


@register("W_t = α W_{t−1} + η (v − W_{t−1} p) kᵀ")
def comba() -> MemoryRule:
    """W_t = α_t W_{t−1} + η_t (v_t − W_{t−1} p_t) k_tᵀ: Comba (arXiv 2506.02475), whose transition is α I − η p kᵀ.

    Gates: α (`retention`), the read key p (`removal_key`; a multiple of k in Comba), and η = β (`step_size`). Comba reads at
    q − d p. fla: chunk_comba(q, k, v, p, g, beta), with g = log α. Its naive_recurrent_comba decays first, which is another
    function than its kernels.

    With bounds by default, η pᵀk ≤ 1, so that α − η pᵀk ≥ −1. `rules.comba().unbounded()` is the recurrence as published.
    """
    return _with_read_key(retention.Scalar(), Bound())


@register("W_t = W̃ + η (v − W̃ r) kᵀ, W̃ = α W_{t−1}, k = m ⊙ r")
def pgdn() -> MemoryRule:
    """W_t = W̃_t + η_t (v_t − W̃_t k_t)(m_t ⊙ k_t)ᵀ, W̃_t = α_t W_{t−1}: preconditioned Gated DeltaNet (arXiv 2604.21100).

    m is the inverse of a diagonal estimate of the curvature (`mixers.curvature`). Gates: α (`retention`), η (`step_size`), and k as
    the read key (`removal_key`), where the k of a call is the write key m ⊙ k. fla: chunk_precond_gated_delta_rule.

    With bounds by default, η kᵀ(m ⊙ k) ≤ 2: up to a reflection. `rules.pgdn().unbounded()` is the recurrence as published.
    """
    return _with_read_key(retention.Scalar(decay_first=True))


def pkda() -> MemoryRule:
    """W_t = W̃_t + η_t (v_t − W̃_t k_t)(m_t ⊙ k_t)ᵀ, W̃_t = W_{t−1} Diag(α_t): preconditioned KDA (arXiv 2604.21100).

    The rule is `gdn2`, called as `pgdn`. fla: naive_recurrent_precond_kda.
    """
    return gdn2()


def _with_read_key(decay: retention.Retention, bound: Bound = _REFLECTING) -> MemoryRule:
    return MemoryRule(
        structures.Matrix(), objectives.DeltaKeys(), optimizer=optimizers.GradientDescent(), retention=decay,
        chunk_size=1, bound=bound,
    )  # fmt: skip
