"""The state of a cached memory."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Int, PyTree

from atlasjax.memory.tokens import Tokens


class CachedTokens(NamedTuple):
    """The tokens of a call with the gates of the inner rule; u (None for "residual") and λ (None if not `blended`), [batch, time,
    heads, …]. Segment ids are not among them: a `CachedRule` makes segments of its own."""

    tokens: Tokens
    connector: Float[Array, "*tokens heads connector_dim"] | None
    blend: Float[Array, "*tokens heads"] | None


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


def in_segment(state: PyTree, segment: Int[Array, " batch"] | None) -> PyTree:
    """A state of the inner rule with the segment id of its last token, [batch], where it has the field `segment`."""
    if not hasattr(state, "segment"):
        return state
    return (dataclasses.replace if dataclasses.is_dataclass(state) else type(state)._replace)(state, segment=segment)
