"""`Gates`: the values that control, for each token and head, how a rule writes."""

from typing import NamedTuple

from jaxtyping import Array, Float

Weights = dict[str, Float[Array, "... _out _in"]]  # matrices of a memory by name


class Gates(NamedTuple):
    """Gates per token and head, [batch, time, heads] (without the time axis in `step`). None for gates that the rule does not use.

    float32 or float64. Numbers, and arrays that broadcast to these shapes, such as [heads], are accepted.

    Attributes:
      retention: α ∈ [0, 1]; [batch, time, heads, feature_dim] for per-channel retention.
      step_size: η ≥ 0; [batch, time, heads, value_dim] for one step size per channel. Of a `LargeChunkRule`: [batch, time, heads,
        weights], one for each weight matrix.
      momentum_decay: θ ∈ [0, 1], the decay of the momentum S_t, which is `MemoryState.momentum`.
      window_weights: γ ∈ [0, 1], [batch, time, heads, window]; entry j weights the loss of token t − j.
      threshold: Huber's δ > 0, the norm of the error at which the loss becomes linear.
      removal_key: the read key r of `objectives.DeltaKeys`, RWKV-7's κ̂; [batch, time, heads, feature_dim].
      removal: RWKV-7's removal rate a ∈ [0, 1], [batch, time, heads, feature_dim].
      connector: u of a `CachedRule`, [batch, time, heads, connector_dim]: key_dim, or 1 + capacity with connector="age".
        Of a `LogLinearRule`: the inverse softplus of λ, [batch, time, heads, 1 + levels].
      blend: λ of a `CachedRule` with `blended`: 0 reads only the current memory, 1 is the rule without `blended`.
      write_size: β ∈ [0, 1], how much of S_t the token writes (`Optimizer.write_gate`).
    """

    retention: Float[Array, "*tokens heads"] | Float[Array, "*tokens heads feature_dim"] | None = None
    step_size: Float[Array, "*tokens heads"] | Float[Array, "*tokens heads value_dim"] | None = None
    momentum_decay: Float[Array, "*tokens heads"] | None = None
    window_weights: Float[Array, "*tokens heads window"] | None = None
    threshold: Float[Array, "*tokens heads"] | None = None
    removal_key: Float[Array, "*tokens heads feature_dim"] | None = None
    removal: Float[Array, "*tokens heads feature_dim"] | None = None
    connector: Float[Array, "*tokens heads connector_dim"] | None = None
    blend: Float[Array, "*tokens heads"] | None = None
    write_size: Float[Array, "*tokens heads"] | None = None
