"""Checks of a user's own mixer when a model is built with it: what its methods take and return. Nothing is computed or compiled.

Otherwise a mistake would appear where the mixer is used: in a loop over layers, or only when tokens are decoded.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import PyTree

from atlasjax.memory.layerwise import changed, take_layer
from atlasjax.mesh_axes import MESH_AXES
from atlasjax.names import in_one_line, signature_of
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.mixers import FirstValuesMixer, Mixer, ObservedMixer, is_layerwise, make_mixer, observe, with_first

_BATCH = 2
# Tokens of whole sequences, and whether they are packed. 5 is odd and short, 64 is a multiple of most chunks, 4,096 of all.
_WHOLE = ((5, False), (64, True), (64, False), (5, True), (4096, False), (4096, True))
_PIECES = (1, 3)  # tokens that are read at once
_LENGTH = 128  # max_length of a state
_SEGMENTS = 2
_LAYERS = 2
_MESH = AbstractMesh((1,) * len(MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def check_own_mixers(config: ModelConfig) -> None:
    """Checks the mixers of a model and of its branch that are named "package.module:Class". Tests cover the library's.

    `__call__` or `observe`, `init_state` and `extend` or `extend_layer` are evaluated abstractly, whichever the model uses. An
    `init_state` or `extend` that raises NotImplementedError is of a mixer that does not decode. Whole sequences may be restricted,
    to some lengths, or to packed or single documents: of six combinations one must be accepted.

    Raises:
      ValueError: a mixer has a parameter without logical axes, another array than parameters, or a method that takes or returns
        something else than `Mixer` says. The message names the mixer and the method or the parameter.
    """
    for where, mixer, its_config in _own_mixers(config):
        _check_whole_sequences(where, mixer, its_config)
        with contextlib.suppress(_NotImplemented):
            _check_decoding(where, mixer, its_config)


def check_own_calls(config: ModelConfig, time: int, *, packed: bool) -> None:
    """Checks that the mixers named "package.module:Class" take whole sequences of `time` tokens.

    Raises:
      ValueError: one does not. The message names the mixer and the call.
    """
    for where, mixer, its_config in _own_mixers(config):
        _check_whole_sequence(where, mixer, its_config, time, packed)


@functools.lru_cache
def why_not_decoded(config: ModelConfig) -> str | None:
    """The error of a mixer of a model or of its branch when tokens are decoded: one that is named "package.module:Class" and whose
    `init_state` or `extend` raises NotImplementedError. None if there is no such mixer."""
    for where, mixer, its_config in _own_mixers(config):
        try:
            _check_decoding(where, mixer, its_config)
        except _NotImplemented as error:
            return str(error)
    return None


def _own_mixers(config: ModelConfig) -> Iterator[tuple[str, Mixer, ModelConfig]]:
    """The user's own mixers of a model and of its branch: how messages name them, the abstract mixer, and its config."""
    for name in dict.fromkeys(config.pattern):
        if ":" in name:
            yield f"mixer {name!r}:", _create(name, config), config
    if (branch := config.branch_alone) is not None:
        yield from _own_mixers(branch)


def _create(name: str, config: ModelConfig) -> Mixer:
    """The abstract mixer, whose arrays are all parameters with logical axes."""

    def create(**streams: int) -> Mixer:
        return nnx.eval_shape(lambda: make_mixer(name, config, rngs=nnx.Rngs(**streams)))

    mixer = create(default=0)
    _, params, *others = nnx.split(mixer, nnx.Param, ...)
    arrays = list(nnx.to_flat_state(others[0]))
    # In a trace, Flax takes an array that is an attribute itself for a static value.
    arrays += [
        ((*path, attribute), value)
        for path, module in nnx.iter_modules(cast(nnx.Module, mixer))
        for attribute, value in vars(module).items()
        if isinstance(value, jax.Array)
    ]
    for path, other in arrays:
        kind = f"nnx.{type(other).__name__}" if isinstance(other, nnx.Variable) else "array"
        raise ValueError(
            f"mixer {name!r}: {_dotted(path)} is an {kind}; the arrays of a mixer should all be parameters, made with "
            "atlasjax.nn.param or atlasjax.nn.Linear. Make a constant in the method that uses it. Dropout is ModelConfig.dropout."
        )
    for path, variable in nnx.to_flat_state(params):
        axes = variable.get_metadata("logical_axes", None)
        shape = variable.get_value().shape
        if axes is None or len(axes) != len(shape):
            raise ValueError(
                f"mixer {name!r}: parameter {_dotted(path)} {list(shape)} has the logical axes {axes}; create it with "
                "atlasjax.nn.param or atlasjax.nn.Linear, not with nnx.Param or nnx.Linear, so that each axis has a name or None."
            )
        if (dtype := variable.get_value().dtype) != jnp.float32:
            raise ValueError(f"mixer {name!r}: parameter {_dotted(path)} {list(shape)} is {dtype}; it must be float32.")
    try:
        create(params=0)
    except ValueError as error:
        raise ValueError(
            f"mixer {name!r}: __init__ should take random numbers from rngs.params(), the only stream of a model; "
            f"{str(error).partition(': __init__ ')[2]}"
        ) from error
    return mixer


def _check_whole_sequences(where: str, mixer: Mixer, config: ModelConfig) -> None:
    _check_takes(where, mixer, _whole_method(mixer), "x", "segment_ids", "max_segments")
    refused: list[ValueError] = []
    accepted = 0
    for time, packed in _WHOLE:
        if accepted == 2:
            break
        try:
            _check_whole_sequence(where, mixer, config, time, packed)
        except _RaisedError as error:
            refused.append(error)
        else:
            accepted += 1
    if not accepted:
        raise refused[0]


def _whole_method(mixer: Mixer) -> str:
    return "observe" if isinstance(mixer, ObservedMixer) else "__call__"


def _check_whole_sequence(where: str, mixer: Mixer, config: ModelConfig, time: int, packed: bool) -> None:
    def run(mixer: Mixer, x: jax.Array, ids: jax.Array | None) -> PyTree:
        first = mixer.first_values(x, None, ids) if isinstance(mixer, FirstValuesMixer) else None
        return observe(mixer, x, ids, None if ids is None else _SEGMENTS, first)

    x = _input(config, time)
    call = f"{where} {_whole_method(mixer)} for x {_text(x)}{' with segment_ids' if packed else ''}"
    got = _evaluate(call, mixer, run, x, jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) if packed else None)
    if not isinstance(got, tuple) or len(got) != 2:  # not of a __call__, to which `mixers.observe` adds the second
        raise ValueError(f"{call} returned {_text(got)}, should return (output, size of the memory or None).")
    y, size = got
    _check_output(call, y, x)
    shape: tuple[int, ...] = getattr(size, "shape", ())
    if size is not None and (len(shape) != 2 or shape[0] != _BATCH or size.dtype != jnp.float32):
        raise ValueError(f"{call} returned the size {_text(size)}, must be None or float32 [{_BATCH}, heads].")


def _check_decoding(where: str, mixer: Mixer, config: ModelConfig) -> None:
    """`init_state`, and the next state and the output of pieces of several lengths."""
    in_place = is_layerwise(mixer)
    method = "extend_layer" if in_place else "extend"
    _check_takes(where, mixer, "init_state", "batch_size", "max_length")
    _check_takes(where, mixer, method, "x", *(("states", "layer") if in_place else ("state",)))

    def run(mixer: Mixer, x: jax.Array, states: PyTree, layer: jax.Array) -> PyTree:
        if is_layerwise(mixer):
            return mixer.extend_layer(x, states, layer)
        state = take_layer(states, layer)
        first = mixer.first_values(x, state, None) if isinstance(mixer, FirstValuesMixer) else None
        return mixer.extend(x, state, **with_first(mixer, first))

    for batch in (_BATCH + 1, _BATCH):  # two, of which one may be the size of another axis
        call = f"{where} init_state({batch}, {_LENGTH})"
        state = _evaluate(call, mixer, lambda mixer, batch=batch: mixer.init_state(batch, _LENGTH))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if leaf.shape[:1] != (batch,):
                place = jax.tree_util.keystr(path) or "its root"
                raise ValueError(
                    f"{call} has {_text(leaf)} at {place}, should have the batch axis first: [{batch}, …]."
                )
    states = jax.tree.map(lambda one: jax.ShapeDtypeStruct((_LAYERS, *one.shape), one.dtype), state)
    for time in _PIECES:
        x = _input(config, time)
        call = f"{where} {method} for x {_text(x)}"
        got = _evaluate(call, mixer, run, x, states, jax.ShapeDtypeStruct((), jnp.int32))
        if not isinstance(got, tuple | list) or len(got) != 2:
            raise ValueError(f"{call} returned {_text(got)}, should return (output, next state).")
        _check_output(call, got[0], x)
        if change := changed(states if in_place else state, got[1]):
            raise ValueError(f"{call} returned a state with {change}.")


class _RaisedError(ValueError):
    """A method raises something."""


class _NotImplemented(_RaisedError):
    """A method raises NotImplementedError."""


def _evaluate(call: str, mixer: Mixer, run: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """`run(mixer, *arguments)`, all abstract; on a mesh of one device, with all axes of a training step, if it raises without.

    Raises:
      _RaisedError: `run` raises something; `_NotImplemented` if it is NotImplementedError. The message starts with `call`.
    """
    graphdef, params = nnx.split(mixer)
    merged = lambda params, *arguments: run(nnx.merge(graphdef, params), *arguments)
    try:
        return jax.eval_shape(merged, params, *arguments)
    except Exception as error:
        with jax.sharding.use_abstract_mesh(_MESH), contextlib.suppress(Exception):
            return jax.eval_shape(merged, params, *arguments)
        kind = _NotImplemented if isinstance(error, NotImplementedError) else _RaisedError
        raise kind(f"{call} raised {in_one_line(error, type(mixer).__module__)}.") from error


def _check_takes(where: str, mixer: Mixer, method: str, *names: str) -> None:
    """Raises ValueError if a method cannot be called with positional arguments of these names, and with the keyword `first` if
    that is what it is called with."""
    signature = signature_of(getattr(mixer, method))
    if signature is None:
        return
    try:
        signature.bind(*names, **(with_first(mixer, jnp.zeros(0)) if method in ("__call__", "extend") else {}))
    except TypeError as error:
        raise ValueError(
            f"{where} {method} has the arguments {signature}, should have ({', '.join(names)}): {error}."
        ) from None


def _check_output(call: str, y: PyTree, x: jax.ShapeDtypeStruct) -> None:
    if _text(y) != _text(x):
        raise ValueError(f"{call} returned the output {_text(y)}, must be of the shape and dtype of x.")


def _input(config: ModelConfig, time: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((_BATCH, time, config.dim), jnp.dtype(config.dtype))


def _text(got: PyTree) -> str:
    """ "float32 [2, 8]" of an array, and the type of anything else."""
    return f"{got.dtype} {list(got.shape)}" if isinstance(got, jax.ShapeDtypeStruct) else f"a {type(got).__name__}"


def _dotted(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))
