"""The gates γ: the weight of each memory in each token's read (Memory Caching §3.1, Eq. 8 and 9)."""

import jax
import jax.numpy as jnp

from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedTokens
from atlasjax.memory.tokens import Tokens


def tokens_of(rule: CachedSpec, tokens: Tokens) -> CachedTokens:
    """Separates the connector and the blend from the gates of `rule.rule`."""
    q, k, v, gates, _ = tokens
    connector = None
    if rule.has_scores:
        connector = q if rule.connector == "query" else gates.connector
    return CachedTokens(Tokens(q, k, v, gates._replace(connector=None, blend=None)), connector, gates.blend)


def pool(rule: CachedSpec, keys: jax.Array, axis: int) -> jax.Array:
    """p of whole segments: keys pooled over their token axis `axis`."""
    return jnp.mean(keys, axis=axis) if rule.pooling == "mean" else jnp.sum(keys, axis=axis)


def running_pool(rule: CachedSpec, total: jax.Array, count: jax.Array) -> jax.Array:
    """p of the current segment, from the sum of its keys so far [..., key_dim] and their number [...]."""
    if rule.pooling != "mean":
        return total
    number = jnp.broadcast_to(jnp.maximum(count, 1), total.shape[:-1])
    return total / number[..., None].astype(total.dtype)


def score(connector: jax.Array, keys: jax.Array) -> jax.Array:
    """⟨u, p⟩ without 1/√d, in at least float32: [..., key_dim] and [..., key_dim] → [...]."""
    return jnp.einsum("...d,...d->...", connector, keys, precision=jax.lax.Precision.HIGHEST)


def by_age(connector: jax.Array, age: jax.Array) -> jax.Array:
    """Scores of memories that were cached `age` segments ago: [..., 1 + capacity] and integers [..., n] → [..., n]."""
    return jnp.take_along_axis(connector, jnp.clip(age, 0, connector.shape[-1] - 1), axis=-1)


def gamma(
    rule: CachedSpec, scores: jax.Array, own: jax.Array, visible: jax.Array, blend: jax.Array | None
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


def _gamma(rule: CachedSpec, scores: jax.Array, own: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    low = jnp.where(visible, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(own, jnp.max(low, axis=-1, initial=-jnp.inf)))
    each, mine = unnormalized(rule, scores, visible, top[..., None]), unnormalized(rule, own, None, top)
    if not is_softmax(rule):
        return each, mine
    total = mine + jnp.sum(each, axis=-1)
    return each / total[..., None], mine / total


def is_softmax(rule: CachedSpec) -> bool:
    """Whether γ are divided by their sum, that of the memories read and of the token's own."""
    return rule.has_scores and rule.gate == "softmax"


def unnormalized(rule: CachedSpec, scores: jax.Array, visible: jax.Array | None, top: jax.Array) -> jax.Array:
    """γ, before a softmax divides them by their sum; zero where not visible.

    Args:
      rule: the gate.
      scores: any shape.
      visible: booleans that broadcast against scores. None means all.
      top: the largest score of each token or more, which a softmax subtracts; broadcasts against scores.
    """
    hide = (lambda x: x) if visible is None else (lambda x: jnp.where(visible, x, 0.0))
    if not rule.has_scores or rule.gate == "ones":
        return hide(jnp.ones_like(scores))
    if rule.gate == "raw":
        return hide(scores)
    if rule.gate == "sigmoid":
        return hide(jax.nn.sigmoid(scores))
    # Hidden scores are replaced before the exponential: a selection after it would leave an overflow in the derivative.
    return hide(jnp.exp((scores if visible is None else jnp.where(visible, scores, top)) - top))


def select(rule: CachedSpec, scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Indices of the top k visible memories by score, [..., k]. Ties go to the lower index; invisible memories come last."""
    low = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    number, chosen = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1), []
    # One after another, because XLA would gather the whole batch on every device for `top_k`.
    for _ in range(min(rule.top_k, scores.shape[-1])):
        chosen.append(jax.lax.argmax(low, low.ndim - 1, jnp.int32))
        low = jnp.where(number == chosen[-1][..., None], -jnp.inf, low)
    return jnp.stack(chosen, axis=-1)
