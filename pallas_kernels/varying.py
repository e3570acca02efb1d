"""Kernel calls inside `jax.shard_map`, where jax types each array by the mesh axes over which it varies.

The results of a kernel vary over the axes over which one of its inputs varies. Its inputs are first cast to vary alike. Only jax's
interpreter for `interpret=True` cannot run a kernel there, except with `check_vma=False`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.experimental import pallas as pl
from jax.sharding import ManualAxisType

from pallas_kernels.arguments import Interpret
from pallas_kernels.platforms import only_on_own_platform

Tree = TypeVar("Tree")


def _axes(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which an array varies."""
    return jax.typeof(x).manual_axis_type.varying


def vary_like(tree: Tree, *others: object) -> Tree:
    """Casts `tree` to vary over every manual mesh axis over which it or `others` vary. No effect outside shard_map."""
    axes = frozenset[str]().union(*map(_axes, jax.tree.leaves((tree, others))))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree


def pallas_call(
    kernel: Callable[..., None], out_shape: Sequence[jax.ShapeDtypeStruct], *, implementation: str = "pallas_tpu",
    interpret: Interpret = False, **options: Any,
) -> Callable[..., list[jax.Array]]:  # fmt: skip
    """`pl.pallas_call`, also inside shard_map. Compiled for a platform that is not that of the implementation it is refused."""

    def call(*arrays: jax.Array) -> list[jax.Array]:
        arrays = vary_like(arrays)
        if not interpret:
            arrays = (only_on_own_platform(arrays[0], implementation), *arrays[1:])
        varying = ManualAxisType(varying=_axes(arrays[0]))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in out_shape]
        return pl.pallas_call(kernel, out_shape=shapes, interpret=interpret, **options)(*arrays)

    return call
