"""Parameters that know the logical names of their axes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

AXES = ("layers", "vocab", "embed", "mlp", "heads", "conv", "rank", "memory_in", "memory_out")
"""Legend of logical axes.

layers: the stacked layers · vocab: tokens of the vocabulary · embed: the residual stream · mlp: hidden width of SwiGLU ·
heads: heads, heads × head_dim, or the inner channels of a state space model · conv: taps of a convolution · rank: the narrow side
of a low-rank product, or a state space model's state · memory_in, memory_out: the two sides of a memory's matrix.
An axis without a name (None) is never sharded.
"""


def param(value: jax.Array, *axes: str | None) -> nnx.Param:
    """An `nnx.Param` that names its axes in the metadata `logical_axes`.

    Our own key, and not flax's `out_sharding`, because that one makes flax shard the value when the Param is created, by
    whatever mesh is set then. Here names are only names; `atlasjax.distributed` turns them into shardings.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in AXES]
    if unknown or len(axes) != value.ndim:
        raise ValueError(f"param: axes {axes} do not name the axes of shape {value.shape}; the legend is {AXES}.")
    return nnx.Param(value, logical_axes=axes)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Normal initial values of standard deviation `scale`, float32."""
    return scale * jax.random.normal(rngs.params(), shape, jnp.float32)


def values(tree: Any) -> Any:
    """A pytree of Params as the same pytree of their arrays."""
    return jax.tree.map(lambda p: p[...], tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
