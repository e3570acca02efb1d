"""The arrays of a mesa memory: learned parameters, and the recurrent state."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class MesaParams(NamedTuple):
    """Learned (outer-loop) parameters of a mesa memory. The first axis of every leaf is heads.

    Attributes:
      weights: {"W": W_0}, the matrix that the regression starts from and is drawn to, [heads, value_dim, key_dim], float32. Zero as
        published, and initially.
      ridge: λ̂ of each key channel, [heads, key_dim], float32. λ = floor + softplus(λ̂) is positive whatever λ̂ is. Initially λ is
        floor + 0.75, which is 1 with the default floor.
    """

    weights: dict[str, Float[Array, "heads value_dim key_dim"]]
    ridge: Float[Array, "heads key_dim"]


class MesaState(NamedTuple):
    """The sums of the regression. float32 (float64 for float64 inputs) and int32, batch axis first.

    Attributes:
      key_sums: H_t, [batch, heads, key_dim, key_dim], symmetric. λ is not in it.
      value_sums: G_t, [batch, heads, value_dim, key_dim].
      segment: segment id of the last token, [batch], −1 if no token had one.
    """

    key_sums: Float[Array, "batch heads key_dim key_dim"]
    value_sums: Float[Array, "batch heads value_dim key_dim"]
    segment: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1
