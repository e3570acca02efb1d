"""Parameters with logical axis names."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

Tree = TypeVar("Tree")  # of Params

AXES = ("layers", "vocab", "embed", "mlp", "experts", "heads", "conv", "rank", "memory_in", "memory_out")
"""Logical axis names.

layers: stacked layers · vocab: vocabulary · embed: width of the residual stream · mlp: hidden width of the feed-forward network ·
experts: its experts · heads: heads, heads × head_dim, or the inner channels of a state space model · conv: taps of a convolution ·
rank: the rank of a low-rank product, or the state of a state space model · memory_in, memory_out: the input and output side of a
memory's matrix.
An axis without a name (None) is never sharded.
"""


def param(value: jax.Array, *axes: str | None) -> nnx.Param:
    """An `nnx.Param` with axis names in its metadata `logical_axes`.

    Flax's own key `out_sharding` is not used, because with it flax shards the value on the current mesh when the Param is created.
    Here the names have no effect until `atlasjax.distributed` turns them into shardings.

    Args:
      value: the initial value.
      *axes: a name in `AXES`, or None, for each axis of `value`.

    Raises:
      ValueError: a name is not in `AXES`, or the number of names is wrong.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in AXES]
    if unknown or len(axes) != value.ndim:
        known = ", ".join(sorted(AXES))
        raise ValueError(
            f"param: axes is {axes}, should have one of {known} or None for each axis of shape {value.shape}."
        )
    return nnx.Param(value, logical_axes=axes)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Normal initial values with standard deviation `scale`, float32."""
    return scale * jax.random.normal(rngs.params(), shape, jnp.float32)


def values(tree: Tree) -> Tree:
    """The same pytree with the array of each Param in its place."""
    return jax.tree.map(lambda p: p[...], tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
