"""The state of a cached memory."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from atlasjax import check
from atlasjax.memory.gates import Gates
from atlasjax.memory.rule import Params

if TYPE_CHECKING:
    from atlasjax.memory.caching.rule import CachedRule


class Tokens(NamedTuple):
    """The tokens of a call: q, k, v as in `memory.scan`, the rule's gates, u (None for "residual") and λ (None if not `blended`),
    [batch, time, heads, …]."""

    q: Float[Array, "batch time heads key_dim"]
    k: Float[Array, "batch time heads key_dim"]
    v: Float[Array, "batch time heads value_dim"]
    gates: Gates
    connector: Float[Array, "batch time heads connector_dim"] | None
    blend: Float[Array, "batch time heads"] | None


def tokens_of(
    rule: "CachedRule",
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gates: Gates,
) -> Tokens:
    """Separates the connector and the blend from the gates of `rule.rule`."""
    connector = None
    if rule.has_scores:
        connector = q if rule.connector == "query" else gates.connector
    return Tokens(q, k, v, gates._replace(connector=None, blend=None), connector, gates.blend)


class CachedState(NamedTuple):
    """The current memory and those of earlier segments. float32 (float64 for float64 inputs) and int32, with the batch axis first.

    A segment's memory moves to the cache when the first token of the next segment is read. Until then it is `online`.

    Attributes:
      online: state of the current segment's memory.
      cached: θ^(i), name → [batch, heads, memories, out, in]. Memory number i is stored at i mod memories. For a softmax memory:
        keys [batch, heads, memories, entries, key_dim], coefficients, decay [batch, heads, memories, entries, 1], and W1 if there
        is one.
      keys: p^(i), [batch, heads, memories, key_dim].
      key_sum: sum of the current segment's keys, [batch, heads, key_dim].
      position: number of tokens of the current segment read so far, in [0, segment_size], [batch].
      cached_count: number of memories cached so far, including evicted ones, [batch].
    """

    online: PyTree
    cached: dict[str, Float[Array, "batch heads memories _ _"]]
    keys: Float[Array, "batch heads memories key_dim"]
    key_sum: Float[Array, "batch heads key_dim"]
    position: Int[Array, " batch"]
    cached_count: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


def init_state(
    rule: "CachedRule[Params]", params: Params, *, batch_size: int, max_length: int | None = None
) -> CachedState:
    """A fresh memory and an empty cache.

    Args:
      rule: the cached rule.
      params: parameters of `rule.rule`.
      batch_size: number of batch elements.
      max_length: maximum number of tokens that will be read. Required if `rule.capacity` is None, and ignored otherwise. Outputs
        of tokens beyond it that need another slot in the cache are NaN.

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


def fresh_memory(rule: "CachedRule[Params]", params: Params, batch_size: int) -> PyTree:
    """A fresh state of the inner rule, with room for the tokens of one segment."""
    return rule.rule.init_state(params, batch_size=batch_size, max_length=rule.segment_size)


def in_segment(state: PyTree, segment: Int[Array, " batch"] | None) -> PyTree:
    """A state of the inner rule with the segment id of its last token, [batch], where it has the field `segment`."""
    if not hasattr(state, "segment"):
        return state
    return (dataclasses.replace if dataclasses.is_dataclass(state) else type(state)._replace)(state, segment=segment)


def empty_cache(rule: "CachedRule[Params]", params: Params, online: PyTree, places: int) -> CachedState:
    """A fresh state whose empty cache has `places` slots, with `online` as the current memory."""
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
