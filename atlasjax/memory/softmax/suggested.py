"""Initial step sizes of a `SoftmaxRule`.

Softmax memories (`SoftmaxRule`, normalized): the first layer is an average of coefficients a_i, each written only by the
Γ = Σ_j γ_j of the few tokens that have i in their window, so the chunk does not multiply its step. A matrix with the dot-product
loss is softmax attention at η = 1, so it starts at 1 and may go up to 2. Under ℓ2, exact = 1/Γ. In an MLP, W1 takes a write from
every token, with hidden values of size up to about η Γ / 4. Under ℓ2 the worst chunk then stays below one at η³ = 16 / (b Γ³).
Under the dot-product loss W1 grows by a factor of at most 1 + (1.13 η Γ)² per token, whatever its size, against retention's α, so η
starts at √(1 − α)/(2 Γ). A read W1 σ(h) is then about η W1 W1ᵀ/4 times a value, so W1 starts at 2/√η times its fan-in scale, which
makes the factor about one (`start_scale`). With momentum each write is added 1/(1 − θ) times in all, by which η is divided. A
bounded write may then go 1/(H Γ) of the way, whatever θ is (`SoftmaxRule.step_bound`), and η starts at no more than half of this.
"""

import numpy as np

from atlasjax.memory import bounds
from atlasjax.memory.softmax.spec import SoftmaxSpec


def start_scale(rule: SoftmaxSpec, step_size: np.ndarray) -> np.ndarray:
    """Initial scale of each head's weights relative to their fan-in scale. step_size: initial η, [heads]."""
    if not rule.structure.is_matrix and rule.objective.gradient_is_value:
        return 2.0 / np.sqrt(step_size)
    return np.ones_like(step_size)


def suggested_steps(
    rule: SoftmaxSpec, forgetting: np.ndarray, momentum_decay: np.ndarray, window_weights: np.ndarray
) -> tuple[np.ndarray, float]:
    """`Rule.suggested_steps`: initial η of each head, and its upper bound."""
    gamma = window_weights.sum(axis=1)  # Γ
    matrix = rule.structure.is_matrix
    if rule.objective.gradient_is_value:
        step = np.ones_like(forgetting) if matrix else 0.5 * np.sqrt(forgetting) / gamma
        top = 2.0 if matrix else 16 * step.max()
    else:
        exact = 1.0 / gamma
        if not matrix:
            exact = np.minimum(exact, (16.0 / (rule.chunk_size * gamma**3)) ** (1 / 3))
        step, top = 0.5 * exact, 2 * exact.max()
    scale = np.ones_like(forgetting)
    if not rule.normalized:
        scale = scale / (np.e * rule.chunk_size)  # without Z a read is a sum of up to e^{1/√d} per token
    if rule.optimizer.has_momentum:
        scale = scale * (1.0 - momentum_decay)
        if rule.objective.has_target:
            step = np.minimum(step, 0.5 / (bounds.HORIZON * gamma * (1.0 - momentum_decay)))
    return step * scale, float(np.max(top * scale))
