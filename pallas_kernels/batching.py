"""Batching of kernels whose first axis is a batch of independent rows."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

Y = TypeVar("Y")  # a tree of arrays


def rows_folded(call: Callable[..., Y]) -> Callable[..., Y]:
    """Wraps a call on arrays [rows, …] so that vmapped axes become further rows of one call, parallel in the kernel's grid."""
    function = custom_vmap(call)

    @function.def_vmap
    def rule(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Y, Y]:
        arrays = tuple(x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, batched))
        ys = function(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
        return jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), ys), jax.tree.map(lambda _: True, ys)

    return function
