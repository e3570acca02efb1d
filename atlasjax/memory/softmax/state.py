"""The arrays of a softmax memory: learned parameters and the recurrent state."""

import dataclasses
import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["num_heads", "key_dim", "value_dim"]
)
@dataclasses.dataclass(frozen=True)
class SoftmaxParams:
    """Learned (outer-loop) parameters. Every leaf has the heads axis first. The sizes are static. A matrix memory has no leaf.

    Attributes:
      weights: the learned start of W1, {"W1": [heads, value_dim, expansion · value_dim]}, float32; {} for a matrix memory.
      num_heads, key_dim, value_dim: sizes.
    """

    weights: dict[str, Float[Array, "heads value_dim width"]]
    num_heads: int
    key_dim: int
    value_dim: int


class Tail(NamedTuple):
    """The window − 1 tokens up to t', oldest first, then the tokens after t' (pending = b − 1 places): tail = window − 1 + pending.

    Empty places hold zeros and gates without effect. Gates exist only for the tokens after t'.

    Attributes:
      keys: [batch, heads, tail, key_dim].
      values: [batch, heads, tail, value_dim].
      preactivations: h_{t'}(k) of those keys, [batch, heads, tail, width]. None if gradients do not need it.
      retention, step_size, momentum_decay: [batch, heads, pending]. Ones if the rule has no such gate.
      window_weights: [batch, heads, pending, window]. Ones if the rule has no such gate.
    """

    keys: Float[Array, "batch heads tail key_dim"]
    values: Float[Array, "batch heads tail value_dim"]
    preactivations: Float[Array, "batch heads tail width"] | None
    retention: Float[Array, "batch heads pending"]
    step_size: Float[Array, "batch heads pending"]
    momentum_decay: Float[Array, "batch heads pending"]
    window_weights: Float[Array, "batch heads pending window"]


class SoftmaxState(NamedTuple):
    """The state of a softmax memory. t' is the last token before the current chunk.

    float32 (float64 for float64 inputs) and int32; every leaf has the batch axis first. The number of entries is `cache_window`,
    or max_length for a full cache. Entries are in order of time: with a cache window they end at the last place, in a
    full cache they begin at place 0.

    Attributes:
      keys: k_i, [batch, heads, entries, key_dim].
      coefficients: a_i(t'), [batch, heads, entries, width].
      momentum: s_i(t'), like coefficients, None without momentum.
      decay: ρ_i(t'), [batch, heads, entries].
      num_tokens: number of tokens up to t', [batch], at most `entries` with a cache window. If it exceeds them in a full
        cache, further outputs are NaN.
      weights: W1 at t', {"W1": [batch, heads, value_dim, width]}; {} for a matrix memory.
      weights_momentum: momentum of W1, None without momentum.
      tail: the tokens that steps still write to, and those of the unfinished chunk.
      position: number of tokens of the current chunk read so far, in [0, chunk_size), [batch]; 0 if the chunk size has no effect.
      segment: segment id of the last token, [batch], −1 if no token had one.
    """

    keys: Float[Array, "batch heads entries key_dim"]
    coefficients: Float[Array, "batch heads entries width"]
    momentum: Float[Array, "batch heads entries width"] | None
    decay: Float[Array, "batch heads entries"]
    num_tokens: Int[Array, " batch"]
    weights: dict[str, Float[Array, "batch heads value_dim width"]]
    weights_momentum: dict[str, Float[Array, "batch heads value_dim width"]] | None
    tail: Tail
    position: Int[Array, " batch"]
    segment: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1
