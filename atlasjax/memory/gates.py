"""`Gates`: the values that control, for each token and head, how a rule writes."""

from typing import NamedTuple

import jax

Weights = dict[str, jax.Array]  # matrices of a memory by name


class Gates(NamedTuple):
    """Gates per token and head, [batch, time, heads] (without the time axis in `step`). None for gates that the rule does not use.

    float32 or float64. Numbers, and arrays that broadcast to these shapes, such as [heads], are accepted.

    Attributes:
      retention: α ∈ [0, 1]; [batch, time, heads, D] for per-channel retention.
      step_size: η ≥ 0; [batch, time, heads, value_dim] for one step size per channel.
      momentum_decay: θ ∈ [0, 1], the decay of the momentum S_t, which is `MemoryState.momentum`.
      window_weights: γ ∈ [0, 1], [batch, time, heads, c]; entry j weights the loss of token t − j. c is `MemoryRule.window`.
      threshold: Huber's δ > 0, the norm of the error at which the loss becomes linear.
      removal_key: RWKV-7's κ̂, [batch, time, heads, D].
      removal: RWKV-7's removal rate a ∈ [0, 1], [batch, time, heads, D].
      connector: u of a `CachedRule`, [batch, time, heads, key_dim].
      blend: λ of a `CachedRule` with `blended`: 0 reads only the current memory, 1 is the rule without `blended`.
    """

    retention: jax.Array | None = None
    step_size: jax.Array | None = None
    momentum_decay: jax.Array | None = None
    window_weights: jax.Array | None = None
    threshold: jax.Array | None = None
    removal_key: jax.Array | None = None
    removal: jax.Array | None = None
    connector: jax.Array | None = None
    blend: jax.Array | None = None
