"""Fresh states of a `CachedRule`."""

import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax import check
from atlasjax.memory.caching.spec import CachedSpec
from atlasjax.memory.caching.state import CachedState
from atlasjax.memory.rule import Params


def init_state(
    rule: CachedSpec[Params], params: Params, *, batch_size: int, max_length: int | None = None
) -> CachedState:
    """A fresh memory and an empty cache.

    Args:
      rule: the cached rule.
      params: parameters of `rule.rule`.
      batch_size: number of batch elements.
      max_length: maximum number of tokens that will be read. Required if `rule.capacity` is None, and ignored otherwise. Outputs
        of tokens beyond it that need another place in the cache are NaN.

    Raises:
      ValueError: max_length is missing or not an integer ≥ 1 where it is required, or the parameters belong to another rule.
    """
    places = rule.capacity
    if places is None:
        if max_length is None:
            raise ValueError(
                "init_state: max_length is None, but this rule keeps the memory of every segment (capacity=None): "
                "give the maximum number of tokens, or a capacity."
            )
        check.integer("init_state", "max_length", max_length)
        places = max(1, (max_length - 1) // rule.segment_size)
    return empty_cache(rule, params, fresh_memory(rule, params, batch_size), places)


def fresh_memory(rule: CachedSpec[Params], params: Params, batch_size: int) -> PyTree:
    """A fresh state of the inner rule, with room for the tokens of one segment."""
    return rule.rule.init_state(params, batch_size=batch_size, max_length=rule.segment_size)


def empty_cache(rule: CachedSpec[Params], params: Params, online: PyTree, places: int) -> CachedState:
    """A fresh state whose empty cache has so many places, with `online` as the current memory."""
    weights = rule.rule.cached_weights(online)
    any_weight = next(iter(weights.values()))
    batch, heads = any_weight.shape[:2]
    key_dim = rule.sizes(params).key_dim
    return CachedState(
        online=online,
        cached={name: jnp.zeros((batch, heads, places, *w.shape[2:]), w.dtype) for name, w in weights.items()},
        keys=jnp.zeros((batch, heads, places, key_dim), any_weight.dtype),
        key_sum=jnp.zeros((batch, heads, key_dim), any_weight.dtype),
        position=jnp.zeros((batch,), jnp.int32),
        cached_count=jnp.zeros((batch,), jnp.int32),
    )
