"""Fresh parameters and states of a `HierarchicalRule`, and checks of the former."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from atlasjax.memory.hierarchical.spec import HierarchicalSpec
from atlasjax.memory.hierarchical.state import HierarchicalParams, HierarchicalState


def init_params(
    rule: HierarchicalSpec, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int
) -> HierarchicalParams:
    """Initial parameters of every memory, each drawn on its own."""
    first, *others = (
        one.init_params(own, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)
        for one, own in zip(rule.members, jax.random.split(key, len(rule.members)), strict=True)
    )
    return HierarchicalParams(first, tuple(others))


def fresh_locals(rule: HierarchicalSpec, params: HierarchicalParams, batch_size: int) -> tuple[PyTree, ...]:
    """The local memories at a restart."""
    return tuple(
        one.init_state(own, batch_size=batch_size, max_length=rule.restart)
        for one, own in zip(rule.local_rules, params.local_memories, strict=True)
    )


def restarted(rule: HierarchicalSpec, params: HierarchicalParams, state: HierarchicalState) -> tuple[PyTree, ...]:
    """`fresh_locals` in the dtypes of a state, which may be wider than the parameters."""
    fresh = fresh_locals(rule, params, state.position.shape[0])
    return jax.tree.map(lambda x, like: x.astype(like.dtype), fresh, state.local_memories)


def init_state(
    rule: HierarchicalSpec, params: HierarchicalParams, *, batch_size: int, max_length: int | None = None
) -> HierarchicalState:
    """`Rule.init_state`."""
    first = rule.global_rule.init_state(params.global_memory, batch_size=batch_size)
    projection = None
    if rule.projected:
        # Parameters that fit any number of heads do not say how many there are; the state does.
        one = next(x for x in jax.tree.leaves(first) if x.ndim > 1)
        key_dim = rule.sizes(params).key_dim
        projection = jnp.zeros((batch_size, one.shape[1], key_dim, key_dim), one.dtype)
    return HierarchicalState(
        global_memory=first,
        local_memories=fresh_locals(rule, params, batch_size),
        projection=projection,
        position=jnp.zeros((batch_size,), jnp.int32),
        segment=jnp.full((batch_size,), -1, jnp.int32),
    )


def check_params(rule: HierarchicalSpec, params: HierarchicalParams, where: str) -> None:
    """Raises TypeError or ValueError if `params` does not belong to this rule."""
    if not isinstance(params, HierarchicalParams) or not isinstance(params.local_memories, tuple):
        raise TypeError(f"{where}: params must be HierarchicalParams with a tuple, got {type(params).__name__}.")
    if len(params.local_memories) != len(rule.local_chunks):
        raise ValueError(
            f"{where}: params.local_memories has {len(params.local_memories)} memories, should have "
            f"{len(rule.local_chunks)}, one for each of local_chunks={rule.local_chunks}."
        )
    rule.global_rule.check_params(params.global_memory, where)
    for i, (one, own) in enumerate(zip(rule.local_rules, params.local_memories, strict=True)):
        one.check_params(own, where)
        here, first = one.sizes(own), rule.sizes(params)
        if here != first:
            raise ValueError(
                f"{where}: params.local_memories[{i}] has {here}, should have the sizes of the global memory, {first}."
            )
