"""Initial step sizes of a `MemoryRule`, derived in the docstring of `atlasjax.memory.suggested`."""

import numpy as np

from atlasjax.memory import bounds
from atlasjax.memory.fast_weights.spec import MemorySpec

_GELU_SLOPE = 1.13  # the largest derivative of GELU


def curvature(rule: MemorySpec, key_dim: int, value_dim: int) -> float:
    """λ, an estimate of the largest squared singular value of ∂M(φ(k))/∂M at M_0 for ‖k‖ = 1, exact for a matrix."""
    return rule.structure.curvature(value_dim) * rule.features.square_norm(key_dim) * rule.retention.slope(value_dim)


def write_count(rule: MemorySpec, momentum_decay: np.ndarray, window_weights: np.ndarray) -> np.ndarray:
    """How often one token's gradient is added to the memory, momentum included to its end: [heads] and [heads, c] → [heads]."""
    return window_weights.sum(axis=1) / (1.0 - momentum_decay if rule.optimizer.has_momentum else 1.0)


def has_steps_of_one_size(rule: MemorySpec) -> bool:
    """Whether the size of the optimizer's steps does not depend on that of the gradient."""
    return rule.optimizer.orthogonalizes or not (rule.optimizer.is_linear or rule.optimizer.is_implicit)


def suggested_steps(
    rule: MemorySpec, key_dim: int, value_dim: int, forgetting: np.ndarray, momentum_decay: np.ndarray, window_weights: np.ndarray,
    similar_keys: bool,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """`Rule.suggested_steps`: initial η of each head, and its upper bound."""
    num_heads, matrix = len(forgetting), rule.structure.is_matrix
    if has_steps_of_one_size(rule):
        step = 0.5 * rule.optimizer.every * forgetting
        if rule.optimizer.orthogonalizes:
            return step, 4 * step.max()
        step = step / rule.features.dim(key_dim) ** 0.5
        return step, 16 * step.max()
    if rule.optimizer.is_implicit:
        return np.full(num_heads, 1.0), 4.0
    if rule.objective.gradient_is_value and matrix:
        return np.full(num_heads, 0.5), 1.0
    writes = write_count(rule, momentum_decay, window_weights)
    if rule.objective.gradient_is_value:
        step = 0.5 * forgetting / (_GELU_SLOPE * rule.features.square_norm(key_dim) ** 0.5 * writes)
        return step, 16 * step.max()
    largest = curvature(rule, key_dim, value_dim)
    exact = 1.0 / (rule.chunk_size * writes * largest)
    gamma = window_weights.sum(axis=1)
    at_once = np.sqrt(rule.chunk_size * gamma)
    top = float(np.max(exact * (1.0 if similar_keys else np.clip(at_once, 1.0, 4.0))))
    step = 0.5 * exact
    if rule.optimizer.has_momentum:
        # Also without a bound, so that a rule and its `unbounded()` start from the same gates.
        horizon = bounds.HORIZON if rule.bound is None else rule.bound.horizon
        share = 0.5 if rule.window == 1 else 0.25  # the windows of neighbours overlap
        step = np.minimum(step, share / (horizon * gamma * largest))
    return step, top
