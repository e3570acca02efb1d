"""The gates γ: the weight of each memory in each token's read (Memory Caching §3.1, Eq. 8 and 9)."""

import jax
import jax.numpy as jnp

from atlasjax.memory.caching.rule import CachedRule


def pool(rule: CachedRule, keys: jax.Array, axis: int) -> jax.Array:
    """p of whole segments: keys pooled over their token axis `axis`."""
    return jnp.mean(keys, axis=axis) if rule.pooling == "mean" else jnp.sum(keys, axis=axis)


def running_pool(rule: CachedRule, total: jax.Array, count: jax.Array) -> jax.Array:
    """p of the current segment, from the sum of its keys so far [..., key_dim] and their number [...]."""
    return total / jnp.maximum(count, 1)[..., None] if rule.pooling == "mean" else total


def score(connector: jax.Array, keys: jax.Array) -> jax.Array:
    """⟨u, p⟩ without 1/√d, in at least float32: [..., key_dim] and [..., key_dim] → [...]."""
    return jnp.einsum("...d,...d->...", connector, keys, precision=jax.lax.Precision.HIGHEST)


def by_age(connector: jax.Array, age: jax.Array) -> jax.Array:
    """Scores of memories that were cached `age` segments ago: [..., 1 + capacity] and integers [..., n] → [..., n]."""
    return jnp.take_along_axis(connector, jnp.clip(age, 0, connector.shape[-1] - 1), axis=-1)


def gamma(
    rule: CachedRule, scores: jax.Array, own: jax.Array, visible: jax.Array, blend: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """γ of the cached memories (zero for those not visible) and γ of the token's own memory.

    Args:
      rule: gate and aggregation. For "ssc", scores and visible are those of the selected memories.
      scores: ⟨u_t, p^(i)⟩, [..., n].
      own: ⟨u_t, p⟩ of the token's own segment, [...].
      visible: [..., n].
      blend: λ, [...], which takes the place of γ_i by λ γ_i and of γ by 1 + λ (γ − 1). None: γ itself.
    """
    cached, mine = _gamma(rule, scores, own, visible)
    if blend is None:
        return cached, mine
    return blend[..., None] * cached, 1 + blend * (mine - 1)


def _gamma(rule: CachedRule, scores: jax.Array, own: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    if not rule.has_scores or rule.gate == "ones":
        return jnp.where(visible, jnp.ones_like(scores), 0.0), jnp.ones_like(own)
    if rule.gate == "raw":
        return jnp.where(visible, scores, 0.0), own
    if rule.gate == "sigmoid":
        return jnp.where(visible, jax.nn.sigmoid(scores), 0.0), jax.nn.sigmoid(own)
    low = jnp.where(visible, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(own, jnp.max(low, axis=-1, initial=-jnp.inf)))
    each = jnp.where(visible, jnp.exp(jnp.where(visible, scores, top[..., None]) - top[..., None]), 0.0)
    mine = jnp.exp(own - top)
    total = mine + jnp.sum(each, axis=-1)
    return each / total[..., None], mine / total


def select(rule: CachedRule, scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Indices of the top k visible memories by score, [..., k]. Ties go to the lower index; invisible memories come last."""
    return jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), min(rule.top_k, scores.shape[-1]))[1]
