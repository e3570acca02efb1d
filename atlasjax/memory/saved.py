"""States in files: `save` and `load`."""

import dataclasses
import numbers
import os

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.check import integer, is_integer
from atlasjax.memory.call_checks import batch_and_heads
from atlasjax.memory.check import check_arrays, check_concrete
from atlasjax.memory.rule import Params, Rule, State, check_rule
from atlasjax.storage import StorePath, tensors
from atlasjax.storage import path as path_of

_KIND = "the state of a memory"
_MOST = 2**31  # tokens are counted in int32


def save(
    rule: Rule[Params, State],
    params: Params,
    state: State,
    path: str | os.PathLike[str] | StorePath,
    *,
    num_tokens: int | None = None,
) -> None:
    """Writes a state to a safetensors file, with the rule, the sizes, the version of the library, and a digest of the parameters.

    The file appears complete or not at all, in the place of one that is there.

    Args:
      rule, params: what the state belongs to. The file has their description, not the parameters themselves.
      state: the state, of any batch size.
      path: the file, on a disk or in a store ("gs://…").
      num_tokens: number of tokens that were read, noted in the file. None: unknown.

    Raises:
      TypeError, ValueError: the state does not belong to the rule and the parameters, the rule is not made of dataclasses, numbers
        and text, or the call is inside jit.
      OSError: the file cannot be written; FileNotFoundError: its folder is not there.
    """
    where = "memory.save"
    integer(where, "num_tokens", num_tokens, 0, optional=True, kinds=numbers.Integral)
    about = _about(rule, params, where)
    check_arrays(where, state=state)
    check_concrete(where, state=state)
    batch, heads = batch_and_heads(rule, params, state, where)
    rule.check_state(params, state, batch, heads, where)
    sizes = {"batch_size": batch, "max_length": rule.max_length(state), "num_tokens": num_tokens}
    tensors.save(path_of(path), _KIND, tensors.named(state, "state"), about | sizes)


def load(rule: Rule[Params, State], params: Params, path: str | os.PathLike[str] | StorePath) -> State:
    """Reads a state that `save` wrote, for the same rule and parameters.

    Args:
      rule, params: those that the state was saved with.
      path: the file, on a disk or in a store ("gs://…").

    Returns:
      The state, bit for bit, on the default device.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError, ValueError: the file is damaged or of another kind, or it was saved with another rule, other sizes or other
        parameters; the message says what differs.
    """
    where = "memory.load"
    here, file = _about(rule, params, where), path_of(path)
    named = f"{where}: {str(file)!r}"
    arrays, about = tensors.load(file, _KIND)
    for name in ("rule", "sizes"):
        found = tensors.difference(about.get(name), here[name], name)
        if found is not None:
            raise ValueError(f"{named} was saved with another memory: {found}.")
    if about.get("params_sha256") != here["params_sha256"]:
        raise ValueError(f"{named} was saved with other parameters; give those with which it was written.")
    counts = lambda value: is_integer(value, 1) and value < _MOST
    batch_size = tensors.entry(about, "batch_size", named, counts, f"an integer from 1 to {_MOST - 1}")
    max_length = tensors.entry(
        about,
        "max_length",
        named,
        lambda value: value is None or counts(value),
        f"None or an integer from 1 to {_MOST - 1}",
    )
    make = lambda p: rule.init_state(p, batch_size=batch_size, max_length=max_length)
    fresh = jax.eval_shape(make, params)
    expected = tensors.named(fresh, "state")
    wide = {str(x.dtype) for x in arrays.values() if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype}
    if wide:
        raise ValueError(f"{named} has {', '.join(wide)}, which needs jax.config.update('jax_enable_x64', True).")
    # The floats of a state may be wider than those of a fresh one.
    shapes = {name: _with_floats(x, arrays.get(name)) for name, x in expected.items()}
    tensors.check_arrays(arrays, shapes, named)
    state = jax.tree.unflatten(jax.tree.structure(fresh), [jnp.array(arrays[name]) for name in expected])
    rule.check_state(params, state, *batch_and_heads(rule, params, state, where), where)
    return state


def _with_floats(expected: jax.ShapeDtypeStruct, have: np.ndarray | None) -> jax.ShapeDtypeStruct:
    floats = have is not None and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (expected, have))
    return jax.ShapeDtypeStruct(expected.shape, have.dtype if have is not None and floats else expected.dtype)


def _about(rule: Rule[Params, State], params: Params, where: str) -> dict[str, object]:
    """The rule, the sizes and the parameters of a state, as values of JSON."""
    check_rule(rule, where)
    rule.check_params(params, where)
    check_arrays(where, params=params)
    check_concrete(where, params=params)
    return {
        "rule": _described(rule, f"{where}: rule"),
        "sizes": rule.sizes(params)._asdict(),
        "params_sha256": tensors.digest(tensors.named(params, "params")),
    }


def _described(value: object, name: str) -> object:
    """A rule or a part of one: its class and its fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        title = kind.__name__ if kind.__module__.startswith("atlasjax.") else f"{kind.__module__}:{kind.__qualname__}"
        fields = {x.name: _described(getattr(value, x.name), f"{name}.{x.name}") for x in dataclasses.fields(value)}
        return {"class": title, **fields}
    if isinstance(value, tuple | list):
        return [_described(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{name} is a {type(value).__name__}, which a file cannot describe; it must be a dataclass, a number, text, None, or a "
        "tuple of these."
    )
