"""The check of a model's cache before tokens are read: whether it is one of this model, whatever it has room for."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import PyTreeDef, default_registry
from jaxtyping import PyTree

from atlasjax.check import instance, plain_array
from atlasjax.memory.check import ARRAYS

_LENGTH = 128  # max_length of the states that are compared with; no size that it determines is compared
_Shapes = tuple[tuple[tuple[int, ...], jnp.dtype], ...]


def check_cache(layers: nnx.Module, cache: PyTree, batch: int, where: str) -> None:
    """Raises TypeError or ValueError unless a cache has the states of the layers, for this number of sequences and any of tokens.

    Args:
      layers: the stacked layers, as `LanguageModel.layers`.
      cache: their states, [repetitions, batch, …], which have not been checked.
      batch: number of sequences.
      where: name of the calling function, for messages.
    """
    try:
        _compare(_expected(layers, batch, _LENGTH), cache, "cache", where)
    except (TypeError, ValueError) as error:
        try:  # a mixer of your own may have another state where no length is given
            _compare(_expected(layers, batch, None), cache, "cache", where)
        except (TypeError, ValueError):
            raise error from None


def check_inner(make: Callable[[], PyTree], state: PyTree, where: str) -> None:
    """`check_cache` of the state of an inner loop, of which `make` returns a fresh one. It is not called, only traced."""
    _compare(jax.eval_shape(make), state, "cache.inner", where)


def _expected(layers: nnx.Module, batch: int, length: int | None) -> PyTree:
    """The shapes and dtypes of fresh states."""
    graphdef, params = nnx.split(layers, nnx.Param)
    leaves, structure = jax.tree.flatten(params)
    try:
        return _fresh(graphdef, structure, tuple((x.shape, x.dtype) for x in leaves), batch, length)
    except TypeError:  # an attribute without a hash, such as a function in place of a norm
        return jax.eval_shape(lambda params: _states(graphdef, params, batch, length), params)


def check_state(mixer: nnx.Module, state: object, kind: type, *fields: str) -> None:
    """Raises ValueError unless the state of a mixer is of its class, with those fields: a memory of None would begin anew."""
    where = f"{type(mixer).__name__}.extend"
    instance(where, "state", state, kind)
    for field in fields:
        if getattr(state, field) is None:
            raise ValueError(f"{where}: state.{field} is None; start with init_state.")


@functools.lru_cache(maxsize=64)
def _fresh(graphdef: nnx.GraphDef, structure: PyTreeDef, shapes: _Shapes, batch: int, length: int | None) -> PyTree:
    params = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in shapes])
    return jax.eval_shape(lambda params: _states(graphdef, params, batch, length), params)


def _states(graphdef: nnx.GraphDef, params: PyTree, batch: int, length: int | None) -> PyTree:
    return jax.vmap(lambda one: nnx.merge(graphdef, one).init_state(batch, length))(params)


def _compare(expected: Any, have: Any, name: str, where: str) -> None:
    """Classes and names must be those expected; of an array its dtype, number of axes, and layers and batch."""
    if isinstance(expected, jax.ShapeDtypeStruct):
        if not isinstance(have, ARRAYS):
            raise TypeError(f"{where}: {name} must be an array, got {type(have).__name__}.")
        plain_array(where, name, have)
        floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (expected, have))
        if not floats and have.dtype != expected.dtype:
            raise TypeError(f"{where}: {name} must be {expected.dtype}, got {have.dtype}.")
        if have.ndim != expected.ndim or have.shape[:2] != expected.shape[:2]:
            layers, batch = expected.shape[:2]
            raise ValueError(
                f"{where}: {name} has shape {have.shape}, should have {expected.ndim} axes, [layers={layers}, batch={batch}, …]."
            )
        return
    if type(have) is not type(expected):
        raise TypeError(
            f"{where}: {name} must be a {type(expected).__name__}, got {type(have).__name__}; start with init_cache of this model."
        )
    parts, own = (list(default_registry.flatten_one_level(node)[0]) for node in (expected, have))
    if isinstance(expected, dict):
        if expected.keys() != have.keys():
            raise ValueError(f"{where}: {name} has the arrays {sorted(have)}, should have {sorted(expected)}.")
        names = [f"{name}[{key!r}]" for key in sorted(expected)]
    else:
        names = [f"{name}.{field}" for field in getattr(expected, "_fields", ())]
    # The number of levels of a memory depends on the room.
    for i, (part, of_cache) in enumerate(zip(parts, own)):
        _compare(part, of_cache, names[i] if i < len(names) else f"{name}[{i}]", where)
