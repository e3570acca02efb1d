"""Support for calls inside `jax.shard_map` and on meshes with explicit axes.

Under `shard_map` JAX types each array by the mesh axes over which it varies, and a loop's carry must keep its type. A fresh memory
varies over no axis, so it is first cast to vary like the tokens. On a mesh with explicit axes the sharding of every result must be
known; the engines leave it to the compiler, as on a mesh with automatic axes.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")
Params = TypeVar("Params")
State = TypeVar("State")


def _varying(x: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which an array varies."""
    return jax.typeof(x).manual_axis_type.varying


def vary_like(tree: Tree, *others: object) -> Tree:
    """Casts `tree` to vary over every manual mesh axis over which it or `others` vary. No effect outside shard_map."""
    axes: set[str] = set()
    for leaf in jax.tree.leaves((tree, others)):
        axes |= _varying(leaf)
    if not axes:
        return tree

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def scan(body: Callable[[Carry, X], tuple[Carry, Y]], init: Carry, xs: X, *, reverse: bool = False) -> tuple[Carry, Y]:
    """`jax.lax.scan` with a carry that varies over the same mesh axes as the inputs."""
    return jax.lax.scan(body, vary_like(init, xs), xs, reverse=reverse)


def on_any_mesh(
    call: Callable[..., tuple[jax.Array, State]], fresh_state: Callable[[Params], State] | None, *, layers: bool = False
) -> Callable[..., tuple[jax.Array, State]]:
    """Wraps a call `(params, state, q, …) → (y, state)` to run under shard_map and on a mesh with explicit axes.

    Args:
      call: the call.
      fresh_state: params → a state with the structure and shapes of the returned one, for calls without a state; None if there are
        none.
      layers: whether states are those of all layers, [layers, batch, …].

    Returns:
      The wrapped call. On a mesh with explicit axes its results are sharded like q: y along all axes, the leaves of the state along
      batch and heads.
    """

    def run(params: Params, state: State | None, q: jax.Array, *rest: object) -> tuple[jax.Array, State]:
        params, state, q, rest = vary_like((params, state, q, rest))
        sharding = jax.typeof(q).sharding
        kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        explicit = tuple(name for name, kind in kinds.items() if kind == AxisType.Explicit)
        if not explicit:
            return call(params, state, q, *rest)
        tokens = PartitionSpec(*sharding.spec, *[None] * (q.ndim - len(sharding.spec)))
        lead = (None, tokens[0]) if layers else (tokens[0],)
        of_state = lambda x: PartitionSpec(*lead) if x.ndim == len(lead) else PartitionSpec(*lead, tokens[-2])
        after = state
        if state is None:
            assert fresh_state is not None
            after = jax.eval_shape(fresh_state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
        # With the mesh of q, because there need not be one in the context (`jax.set_mesh`).
        outputs = jax.tree.map(
            lambda spec: NamedSharding(sharding.mesh, spec),
            (tokens, jax.tree.map(of_state, after)),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        return jax.sharding.auto_axes(call, axes=explicit, out_sharding=outputs)(params, state, q, *rest)

    return run
