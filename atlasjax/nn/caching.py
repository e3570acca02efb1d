"""Memory Caching in a config: the options of `memory.CachedRule` and `memory.LogLinearRule`, and their gates in a layer."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import check, memory
from atlasjax.nn.layers import Linear
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import param


@dataclasses.dataclass(frozen=True)
class CachingConfig:
    """Memory Caching (arXiv 2602.24281) around the rule of a `MemoryConfig` or the recurrence of a mixer (`ModelConfig.caching`).

    The fields are those of `memory.CachedRule`, or with "log_linear" of `memory.LogLinearRule`, which takes segment_size and
    levels only.

    Attributes:
      aggregation: how the reads of cached memories are combined: "residual", "grm", "soup" or "ssc". "log_linear": one memory for
        each level of a Fenwick tree instead of one for each segment.
      segment_size: C ≥ 1, number of tokens after which a memory is cached. A multiple of the rule's chunk size.
      top_k: number of cached memories that "ssc" reads, ≥ 1.
      gate: "softmax", "sigmoid", "raw" or "ones".
      connector: u_t is a projection of the layer's input ("input") or the query ("query"). "age": scores that are a projection of
        the input alone, one for each age of a memory, with a capacity.
      pooling: "mean" or "sum" of a segment's keys.
      start: the memory at the start of a segment: "fresh", or "carry" over from the segment before.
      capacity: maximum number of cached memories, ≥ 1, which bounds the state in decoding. None: unlimited.
      stop_gradient: whether to stop gradients into cached memories.
      blended: whether each head has a learned λ, initially 0, and reads (1 − λ) M_t(q) + λ y instead of y. With start="carry" a
        trained model to which it is added starts with the same outputs. For `ModelConfig.caching` only.
      levels: maximum number of levels of "log_linear", in 1…30.

    Raises:
      ValueError: `blended` is not a bool, or a field that the aggregation does not take is not at its default. Everything
        else is checked where the rule is known. See `memory.CachedRule`.
    """

    aggregation: Literal["residual", "grm", "soup", "ssc", "log_linear"] = "grm"
    segment_size: int = 256
    top_k: int = 2
    gate: Literal["softmax", "sigmoid", "raw", "ones"] = "softmax"
    connector: Literal["input", "query", "age"] = "input"
    pooling: Literal["mean", "sum"] = "mean"
    start: Literal["fresh", "carry"] = "fresh"
    capacity: int | None = None
    stop_gradient: bool = False
    blended: bool = False
    levels: int = 15

    def __post_init__(self) -> None:
        check.boolean("CachingConfig", "blended", self.blended)
        kept = {"aggregation", "segment_size"} | ({"levels"} if self.aggregation == "log_linear" else _CACHED)
        for field in dataclasses.fields(self):
            if field.name not in kept and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"CachingConfig: {field.name} is {getattr(self, field.name)!r}, which aggregation={self.aggregation!r} does "
                    f"not take; should be {field.default!r}."
                )

    @classmethod
    def added(
        cls, aggregation: Literal["residual", "grm", "soup", "ssc"] = "grm", segment_size: int = 256
    ) -> "CachingConfig":
        """What a trained model can be given: memories carry over as before, and the weight of the cached ones starts at 0."""
        return cls(aggregation, segment_size, start="carry", blended=True)

    def around(self, rule: memory.Rule) -> memory.CachedRule | memory.LogLinearRule:
        """`rule` with Memory Caching.

        Raises:
          ValueError: a field is out of range, or "soup" or "carry" is used with a softmax memory.
        """
        if self.aggregation == "log_linear":
            return memory.LogLinearRule(rule, self.segment_size, self.levels)
        return memory.CachedRule(rule, **{name: getattr(self, name) for name in _CACHED})


# The fields of `memory.CachedRule`.
_CACHED = {field.name for field in dataclasses.fields(memory.CachedRule)} - {"rule"}


def connector_projection(rule: memory.Rule, dim: int, num_heads: int, key_dim: int, *, rngs: nnx.Rngs) -> Linear | None:
    """W_u of u = x W_u, for a layer input of width `dim`; None for a rule without the gate `connector`."""
    channels = rule.gate_channels(key_dim).get("connector")
    return None if channels is None else Linear((dim, num_heads, channels), ("embed", "heads", None), rngs=rngs)


class CacheGates(Module):
    """The gates of Memory Caching around a layer's recurrence: u_t = x_t W_u, and one λ per head, initially 0, if `blended`.

    Args:
      rule: the `memory.CachedRule` or `memory.LogLinearRule`, which says what it needs.
      dim: width of the layer input.
      num_heads, key_dim: sizes of the memory.
      rngs: source of the initial values.
    """

    def __init__(self, rule: memory.Rule, dim: int, num_heads: int, key_dim: int, *, rngs: nnx.Rngs):
        self.connector = connector_projection(rule, dim, num_heads, key_dim, rngs=rngs)
        self.blend = (
            param(jnp.zeros(num_heads, jnp.float32), "heads") if "blend" in rule.gate_channels(key_dim) else None
        )

    def __call__(self, x: jax.Array, gates: memory.Gates) -> memory.Gates:
        """The recurrence's gates and those of Memory Caching, for the layer input x [batch, time, dim]."""
        blend = None if self.blend is None else jnp.broadcast_to(self.blend[...], (*x.shape[:2], self.blend.shape[0]))
        return gates._replace(connector=None if self.connector is None else self.connector(x), blend=blend)
