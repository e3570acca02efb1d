"""Support for calls inside `jax.shard_map` and on meshes with explicit axes.

Under `shard_map` JAX types each array by the mesh axes over which it varies, and a loop's carry must keep its type. A fresh memory
varies over no axis, so it is first cast to vary like the tokens. On a mesh with explicit axes the sharding of every result must be
known; the engines leave it to the compiler, as on a mesh with automatic axes.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from atlasjax.memory.tokens import Tokens
from pallas_kernels.varying import vary_like

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")
Params = TypeVar("Params")
State = TypeVar("State")


def scan(body: Callable[[Carry, X], tuple[Carry, Y]], init: Carry, xs: X, *, reverse: bool = False) -> tuple[Carry, Y]:
    """`jax.lax.scan` with a carry that varies over the same mesh axes as the inputs."""
    return jax.lax.scan(body, vary_like(init, xs), xs, reverse=reverse)


def on_any_mesh(
    call: Callable[..., tuple[jax.Array, State]], fresh_state: Callable[[Params], State] | None, *, layers: bool = False
) -> Callable[..., tuple[jax.Array, State]]:
    """Wraps a call `(params, state, tokens, …) → (y, state)` to run under shard_map and on a mesh with explicit axes.

    Args:
      call: the call.
      fresh_state: params → a state with the structure and shapes of the returned one, for calls without a state; None if there are
        none.
      layers: whether states are those of all layers, [layers, batch, …].

    Returns:
      The wrapped call. On a mesh with explicit axes its results are sharded like q: y along all axes, the leaves of the state along
      batch and heads.
    """

    def run(params: Params, state: State | None, tokens: Tokens, *rest: object) -> tuple[jax.Array, State]:
        params, state, tokens, rest = vary_like((params, state, tokens, rest))
        explicit = _explicit_axes(tokens.q)
        if not explicit:
            return call(params, state, tokens, *rest)
        spec = _whole_spec(tokens.q)
        lead = (None, spec[0]) if layers else (spec[0],)
        of_state = lambda x: PartitionSpec(*lead) if x.ndim == len(lead) else PartitionSpec(*lead, spec[-2])
        after = state
        if state is None:
            assert fresh_state is not None
            after = jax.eval_shape(fresh_state, _unsharded(params))
        specs = spec, jax.tree.map(of_state, after)
        return _automatic(call, tokens.q, explicit, specs)(params, state, tokens, *rest)

    return run


def read_on_any_mesh(call: Callable[..., jax.Array], q: jax.Array) -> Callable[..., jax.Array]:
    """Wraps a call whose result is sharded like q, to run on a mesh with explicit axes."""
    explicit = _explicit_axes(q)
    return _automatic(call, q, explicit, _whole_spec(q)) if explicit else call


def fresh_on_any_mesh(fresh_state: Callable[[Params], State], params: Params) -> State:
    """`fresh_state(params)`, on a mesh with explicit axes sharded along heads like the parameters, whose first axis is heads."""
    leaf = next((x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)), None)
    if leaf is None or not (explicit := _explicit_axes(leaf)):
        return fresh_state(params)
    heads = _whole_spec(leaf)[0]
    of_state = lambda x: PartitionSpec() if x.ndim == 1 else PartitionSpec(None, heads)
    specs = jax.tree.map(of_state, jax.eval_shape(fresh_state, _unsharded(params)))
    # Compiled, because zeros that are made one by one are on one device.
    return jax.jit(_automatic(fresh_state, leaf, explicit, specs))(params)


def _explicit_axes(x: jax.Array) -> tuple[str, ...]:
    mesh = jax.typeof(x).sharding.mesh
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


def _whole_spec(x: jax.Array) -> PartitionSpec:
    """The sharding of x along each of its axes."""
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))


def _unsharded(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _automatic(call: Callable[..., Y], x: jax.Array, axes: tuple[str, ...], specs: object) -> Callable[..., Y]:
    """`call` with these axes of x's mesh left to the compiler. specs: the sharding of its results.

    The mesh is that of x, because there need not be one in the context (`jax.set_mesh`).
    """
    mesh = jax.typeof(x).sharding.mesh
    named = lambda spec: NamedSharding(mesh, spec)
    outputs = jax.tree.map(named, specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return jax.sharding.auto_axes(call, axes=axes, out_sharding=outputs)
