"""States of all layers, [layers, batch, …], of which one layer's is read and written, while tokens are decoded.

XLA keeps them in one place. What is taken out of them is copied, and so is what is put back. A rule of which a token changes little
of a large state reads it where it lies, and writes only what changes (`Rule.step_layer`).
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from atlasjax.memory.grid import Tree
from atlasjax.memory.tokens import Tokens

if TYPE_CHECKING:
    from atlasjax.memory.rule import Params, Rule, State


def take_layer(states: PyTree, i: jax.Array | None) -> PyTree:
    """Layer i of states [layers, …]. i None: these are a layer's own states."""
    if i is None:
        return states
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), states)


def put_layer(states: PyTree, state: PyTree, i: jax.Array | None, x: jax.Array, where: str = "put_layer") -> PyTree:
    """States [layers, …] with the next state of layer i.

    Args:
      states: of all layers.
      state: the next state of layer i, of the same tree structure and shapes as one of `states`. It is cast to their dtypes, which
        are of the same kind: tokens in float64 leave float32 states.
      i: the layer, an integer. None: `states` are a layer's own, and the result is `state`.
      x: what the layer computed from its state, such as its output.
      where: what the message starts with.

    Raises:
      ValueError: `state` has another tree structure, shape or kind of dtype. JAX would write a smaller array into a corner of the
        larger, and a cast to integers would truncate.
    """
    if i is None:
        return state
    before = jax.eval_shape(lambda states: jax.tree.map(lambda array: array[0], states), states)
    if change := changed(before, state, cast=True):
        raise ValueError(f"{where}: the next state has {change}.")
    i = after(i, x)
    put = lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, jnp.asarray(one, all_.dtype), i, 0)
    return jax.tree.map(put, states, state)


def changed(before: PyTree, after: PyTree, *, cast: bool = False) -> str | None:
    """Where a state and the next one first differ in tree structure, shape or dtype, such as "float32 [2] at ['x'], should have
    int32 [2] as before"; None if they do not.

    Args:
      before, after: pytrees of arrays or `jax.ShapeDtypeStruct`.
      cast: whether a floating-point dtype may become another one, and an integer dtype too.
    """
    old, new = (
        {jax.tree_util.keystr(path): one for path, one in jax.tree_util.tree_leaves_with_path(abstract)}
        for abstract in jax.eval_shape(lambda *trees: trees, before, after)
    )
    for path in dict.fromkeys((*old, *new)):
        had, has = (f"{x[path].dtype} {list(x[path].shape)}" if path in x else "nothing" for x in (old, new))
        both = [x[path] for x in (old, new) if path in x]
        casts = cast and len(both) == 2 and both[0].shape == both[1].shape and _one_kind(*(one.dtype for one in both))
        if had != has and not casts:
            return f"{has} at {path or 'its root'}, should have {had} as before"
    was: object = jax.tree.structure(before)
    now: object = jax.tree.structure(after)
    return None if was == now else f"the tree structure {now}, should have {was} as before"


def _one_kind(*dtypes: jnp.dtype) -> bool:
    """Whether all dtypes are floating-point, or all are integers."""
    return any(all(jnp.issubdtype(dtype, kind) for dtype in dtypes) for kind in (jnp.floating, jnp.integer))


def put_places(
    all_: Float[Array, "layers batch heads places ..."],
    new: Float[Array, "batch heads ..."],
    i: Int[Array, ""],
    place: Int[Array, " batch"],
    where: Bool[Array, " batch"] | None = None,
) -> Float[Array, "layers batch heads places ..."]:
    """States of all layers with `new` in one place of each row of layer i, written in place. Places out of range are left out.

    where: the rows that are written. None means all.
    """
    place = place if where is None else jnp.where(where, place, all_.shape[3])
    # With an axis of the batch, which XLA can divide over devices.
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, new.ndim)), inserted_window_dims=(0, 3), scatter_dims_to_operand_dims=(0, 3),
        operand_batching_dims=(1,), scatter_indices_batching_dims=(0,),
    )  # fmt: skip
    index = jnp.stack([jnp.full_like(place, i), place], axis=-1)
    return jax.lax.scatter(all_, index, new.astype(all_.dtype), numbers, mode="drop", unique_indices=True)


def take_places(
    all_: jax.Array, i: Int[Array, ""] | None, places: Int[Array, "batch heads n"]
) -> Float[Array, "batch heads n ..."]:
    """The given places of each head, read where they lie.

    all_: [layers, batch, heads, places, …], of which layer i is read. With i None: a layer's own states, without that axis.
    """
    lead = 0 if i is None else 1
    rest = all_.shape[lead + 3 :]
    # With axes of the batch and the heads, which XLA can divide over devices.
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(3, 3 + len(rest))), collapsed_slice_dims=(*range(lead), lead + 2),
        start_index_map=(*range(lead), lead + 2), operand_batching_dims=(lead, lead + 1), start_indices_batching_dims=(0, 1),
    )  # fmt: skip
    index = places[..., None] if i is None else jnp.stack([jnp.full_like(places, i), places], axis=-1)
    sizes = (*(1,) * (lead + 3), *rest)
    return jax.lax.gather(all_, index, numbers, sizes, mode="clip")


def change_some(
    change: Callable[[Tree], Tree], states: Tree, where: Bool[Array, " batch"], x: Float[Array, "..."] | None = None
) -> Tree:
    """`change(states)` if any row is to be changed, otherwise the states as they lie. x: what was computed from them before."""
    some = jnp.any(where)
    return jax.lax.cond(some if x is None else after(some, x), change, lambda states: states, states)


def after(i: jax.Array, x: jax.Array) -> jax.Array:
    """i. On CPUs it depends on x: then all of a layer's reads of its state come before the write, without which XLA may copy the
    states of all layers (Mamba-2, Log-Linear). XLA's CPU compiler drops an `optimization_barrier` before it decides."""
    never = lambda i, x: i + (jnp.max(jnp.abs(x)) > jnp.inf).astype(i.dtype)
    return jax.lax.platform_dependent(i, x, cpu=never, default=lambda i, x: i)


@functools.partial(jax.jit, static_argnames=("rule",), inline=True)
def step_layer(
    rule: "Rule[Params, State]",
    params: "Params",
    states: "State",
    layer: Int[Array, ""],
    tokens: Tokens,
) -> "tuple[Float[Array, 'batch heads value_dim'], State]":
    """`Rule.step_layer` of a rule that has it, otherwise `Rule.step` with a state that is taken out and put back whole."""
    if steps_in_place(rule):
        return rule.step_layer(params, states, layer, *tokens[:4])
    y, state = rule.step(params, take_layer(states, layer), *tokens[:4])
    return y, put_layer(states, state, layer, y, f"{type(rule).__name__}.step")


def steps_in_place(rule: "Rule") -> bool:
    """Whether a rule has `step_layer`. Below the class that defines it, one with a `step` of its own does not."""
    of_class = (vars(kind) for kind in type(rule).__mro__)
    return next(("step_layer" in names for names in of_class if "step_layer" in names or "step" in names), False)
