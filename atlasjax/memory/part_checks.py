"""Checks of a rule's parts, once per rule and sizes: what they return must have the shapes that the engines expect.

A user's part is first met here, for two tokens and without any compilation. Otherwise a mistake in it would be found by JAX while
it traces a loop, with a message about the loop.
"""

import functools
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from atlasjax.check import is_integer
from atlasjax.memory.axes.features import Features
from atlasjax.memory.axes.objectives import Objective
from atlasjax.memory.axes.optimizers import Optimizer
from atlasjax.memory.axes.retention import Retention
from atlasjax.memory.axes.structures import Structure
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.gates import Weights
from atlasjax.memory.products import wide_dtype

_TOKENS = 2
Shape = tuple[int, ...]
T = TypeVar("T")
_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Parts(Protocol):
    """The parts of a `MemoryRule` and of a `SoftmaxRule` that write. Neither can be imported here: both call these checks."""

    @property
    def structure(self) -> Structure: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def retention(self) -> Retention: ...
    @property
    def step_bound(self) -> float | None: ...
    def __hash__(self) -> int: ...


class PartsWithFeatures(Parts, Protocol):
    """The parts of a `MemoryRule` and of a `LargeChunkRule`."""

    @property
    def features(self) -> Features: ...


class PartError(ValueError):
    """A part of a rule fails, or does not return what it should. The message has one line, and names the class and the method."""


def check_parts(rule: PartsWithFeatures, key_dim: int, value_dim: int, key: jax.Array | None = None) -> None:
    """Raises PartError if a part of the rule fails, or returns another shape than it should, for memories of these sizes.

    Called before anything is computed with the parts. `key` is what `Structure.init` will get, None if that is not known.
    """
    feature_dim = check_feature_dim(rule.features, key_dim)
    _check_key_dim(rule.features, key_dim, feature_dim)
    weights = _initial_weights(rule.structure, key, feature_dim, value_dim)
    shapes = tuple((name, weights[name].shape) for name in check_weight_shapes(rule.structure, feature_dim, value_dim))
    coefficients = _initial_coefficients(rule.features)
    of_head = None if coefficients is None else coefficients.shape
    _check(rule, shapes, of_head, key_dim, _state_dtype(weights), _default_float())


def check_choices(rule: PartsWithFeatures, params: MemoryParams, key_dim: int) -> None:
    """`check_parts` for the sizes of parameters. Arrays may be traced; only shapes and dtypes are used.

    Args:
      rule: the memory rule.
      params: parameters whose own shapes have been checked.
      key_dim: size of a key.
    """
    # In the structure's order: JAX sorts the names of a dictionary.
    weights = tuple((name, params.weights[name].shape[1:]) for name in rule.structure.weight_shapes(1, 1))
    coefficients = None if params.coefficients is None else params.coefficients.shape[1:]
    dtype = _state_dtype(params.weights)
    _check(rule, weights, coefficients, key_dim, dtype, _default_float())


def check_feature_dim(features: Features, key_dim: int) -> int:
    """`features.dim(key_dim)`. Raises PartError if it is not an integer ≥ 1."""
    method_name = f"{type(features).__name__}.dim"
    size = tried(method_name, lambda: features.dim(key_dim))
    if not is_integer(size, 1, kinds=numbers.Integral):
        raise PartError(f"{method_name} returned {size!r} for a key of size {key_dim}; it must be an integer ≥ 1.")
    return int(size)


@functools.lru_cache(maxsize=1024)
def check_softmax_choices(rule: Parts, value_dim: int) -> None:
    """`check_parts` of a softmax rule, whose features have any number of channels."""
    _check_writing(rule, check_weight_shapes(rule.structure, value_dim, value_dim), jnp.dtype(jnp.float32))


def _default_float() -> jnp.dtype:
    """float64 where JAX has 64 bits: a part may then return another dtype than it does without them."""
    return jax.dtypes.canonicalize_dtype(float)


def _state_dtype(weights: Mapping[str, Any]) -> jnp.dtype:
    """The dtype of a fresh state of a memory with these weights."""
    return wide_dtype(next(iter(weights.values())).dtype)


@functools.lru_cache(maxsize=1024)
def _check(
    rule: PartsWithFeatures,
    weights: tuple[tuple[str, Shape], ...],
    coefficients: Shape | None,
    key_dim: int,
    dtype: jnp.dtype,
    default_float: jnp.dtype,  # the parts may use it
) -> None:
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    _check_features(rule, array(_TOKENS, key_dim), None if coefficients is None else array(*coefficients))
    _check_writing(rule, dict(weights), dtype)


def _check_writing(rule: Parts, weights: Mapping[str, Shape], dtype: jnp.dtype) -> None:
    """Checks structure, objective, retention and optimizer. weights: name → (out, in), the outermost first."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    matrices = {name: array(*shape) for name, shape in weights.items()}
    value_dim = next(iter(weights.values()))[0]
    _check_structure(rule, matrices, array, value_dim)
    _check_objective(rule, array, value_dim)
    _check_retention(rule, matrices, array)
    if not rule.optimizer.is_implicit:
        _check_optimizer(rule, matrices, array, value_dim)


def check_weight_shapes(structure: Structure, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
    """`structure.weight_shapes(feature_dim, value_dim)`. Raises PartError if it is not as documented there."""
    method_name = f"{type(structure).__name__}.weight_shapes"
    shapes = tried(method_name, lambda: structure.weight_shapes(feature_dim, value_dim))
    returned = f"{method_name} returned {shapes!r} for features of size {feature_dim} and values of size {value_dim}"
    if not isinstance(shapes, dict) or not shapes or not all(map(_is_shape, shapes.values())):
        raise PartError(f"{returned}; it must be a dict, name → (out, in), of at least one weight with integers ≥ 1.")
    outermost, *_, innermost = [*shapes, *shapes]  # the same name if there is one
    rows, columns = shapes[outermost][0], shapes[innermost][1]
    if rows != value_dim or columns != feature_dim:
        raise PartError(
            f"{returned}; the first weight, {outermost!r}, must be the outermost with {value_dim} rows, and the last, "
            f"{innermost!r}, should read the features with {feature_dim} columns."
        )
    smallest = tried(f"{method_name}(1, 1)", lambda: structure.weight_shapes(1, 1))
    if not isinstance(smallest, dict) or list(smallest) != list(shapes):
        raise PartError(f"{returned}, and {smallest!r} for sizes of 1; the names should not depend on the sizes.")
    return {name: (int(rows), int(columns)) for name, (rows, columns) in shapes.items()}


def _is_shape(value: object) -> bool:
    """Whether it is a tuple of two integers ≥ 1."""
    return isinstance(value, tuple) and len(value) == 2 and all(is_integer(x, 1, kinds=numbers.Integral) for x in value)


def _initial_weights(
    structure: Structure, key: jax.Array | None, feature_dim: int, value_dim: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """The checked result of `structure.init`."""
    wanted, method_name = check_weight_shapes(structure, feature_dim, value_dim), f"{type(structure).__name__}.init"
    init = lambda: structure.init(jax.random.key(0) if key is None else key, feature_dim, value_dim)
    weights = tried(method_name, lambda: jax.eval_shape(init))
    right = isinstance(weights, dict) and all(map(_is_floating, weights.values()))
    if not right or {name: w.shape for name, w in weights.items()} != wanted:
        raise PartError(
            f"{method_name} returned {_described(weights)}; it must be a dict of floating-point arrays with the shapes of "
            f"weight_shapes, {wanted}."
        )
    return weights


def _initial_coefficients(features: Features) -> Any:
    """The checked result of `features.init`."""
    method_name = f"{type(features).__name__}.init"
    coefficients = tried(method_name, features.init)
    if coefficients is not None and not _is_floating(coefficients):
        raise PartError(f"{method_name} returned {coefficients!r}; it must be None or a floating-point array.")
    return coefficients


def _check_key_dim(features: Features, key_dim: int, feature_dim: int) -> None:
    method_name = f"{type(features).__name__}.key_dim"
    found = tried(method_name, lambda: features.key_dim(feature_dim))
    if found != key_dim:
        raise PartError(f"{method_name} returned {found!r} for {feature_dim} features; it must be {key_dim}.")


def _check_features(rule: PartsWithFeatures, keys: Any, coefficients: Any) -> None:
    kind, given = rule.features, f"for keys of shape {keys.shape}"
    absent = () if coefficients is not None else ("coefficients is None, as init returns",)
    expected = {"apply": (_TOKENS, check_feature_dim(kind, keys.shape[-1]))}
    if rule.structure.residual:
        expected["degree_one"] = keys.shape
    for method, shape in expected.items():
        method_name = f"{type(kind).__name__}.{method}"
        result = tried(
            method_name, functools.partial(jax.eval_shape, getattr(kind, method), coefficients, keys), absent
        )
        _same_shape(method_name, given, result, shape)


def _check_structure(rule: Parts, matrices: dict[str, Any], array: Any, value_dim: int) -> None:
    kind, method_name = rule.structure, f"{type(rule.structure).__name__}.apply"
    feature_dim = list(matrices.values())[-1].shape[1]

    def apply(matrices: dict[str, jax.Array], x: jax.Array, skip: jax.Array, vector: jax.Array) -> jax.Array:
        applied: Weights = {}

        def linear(name: str, h: jax.Array) -> jax.Array:
            check_applied(kind, name, matrices, applied)
            applied[name] = h
            if jnp.ndim(h) != 2 or h.shape != (_TOKENS, matrices[name].shape[1]):
                raise PartError(
                    f"{method_name}: the weight {name!r} of shape {matrices[name].shape} is applied to an array of shape "
                    f"{jnp.shape(h)}; it must be ({_TOKENS}, {matrices[name].shape[1]}) for {_TOKENS} tokens."
                )
            return h @ matrices[name].T

        norm = {"scale": vector, "bias": vector} if kind.norm else None
        out = kind.apply(linear, x, skip if kind.residual else None, norm)
        check_all_applied(kind, matrices, applied)
        return out

    absent = [] if kind.residual else ["skip is None; with residual = True it is the residual of the memory"]
    absent += [] if kind.norm else ["norm is None; with norm = True it has a scale and a bias"]
    arguments = matrices, array(_TOKENS, feature_dim), array(_TOKENS, value_dim), array(value_dim)
    out = tried(method_name, lambda: jax.eval_shape(apply, *arguments), absent)
    _same_shape(method_name, f"for features of shape {(_TOKENS, feature_dim)}", out, (_TOKENS, value_dim))


def _check_objective(rule: Parts, array: Any, value_dim: int) -> None:
    kind = rule.objective
    method_name, out = f"{type(kind).__name__}.loss", array(_TOKENS, value_dim)
    threshold = array(_TOKENS) if kind.uses_threshold else None
    absent = () if kind.uses_threshold else ("threshold is None; with uses_threshold = True it is the gate",)
    loss = tried(method_name, lambda: jax.eval_shape(kind.loss, out, out, threshold), absent)
    _same_shape(method_name, f"for outputs {out.shape}", loss, (_TOKENS,), "one number for each token, ")


def _check_retention(rule: Parts, matrices: dict[str, Any], array: Any) -> None:
    kind = rule.retention
    for matrix in matrices.values():
        alpha = array(matrix.shape[1]) if kind.gate == "channel" else array()
        vectors = array(matrix.shape[0]), array(matrix.shape[1])
        calls: dict[str, tuple[tuple[Any, ...], Shape]] = {}
        if kind.gate is not None or not kind.is_linear:
            calls["decay"] = (matrix, alpha), matrix.shape
        if kind.has_map:
            calls |= {"start": ((matrix,), matrix.shape), "map": ((matrix,), matrix.shape)}
            if rule.step_bound is not None:
                calls |= {"change_along": ((matrix, matrix), ()), "change_along_outer": ((matrix, *vectors), ())}
        for method, (arguments, shape) in calls.items():
            method_name = f"{type(kind).__name__}.{method}"
            result = tried(method_name, functools.partial(jax.eval_shape, getattr(kind, method), *arguments))
            _same_shape(method_name, f"for a weight of shape {matrix.shape}", result, shape)


def _check_optimizer(rule: Parts, matrices: dict[str, Any], array: Any, value_dim: int) -> None:
    kind, method_name = rule.optimizer, f"{type(rule.optimizer).__name__}.update"
    state = tried(f"{type(kind).__name__}.init", lambda: jax.eval_shape(kind.init, matrices))
    if any(not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(state)):
        raise PartError(
            f"{type(kind).__name__}.init returned the state {_described(state)}; all its arrays must be floating point, also "
            "a count."
        )
    step_size = array(value_dim, 1) if kind.per_channel else array()
    momentum_decay = array() if kind.has_momentum else None
    absent = [] if kind.has_momentum else ["momentum_decay is None; with has_momentum = True it is the gate"]
    absent += ["state is None, as init returns"] if state is None else []
    result = tried(method_name, lambda: jax.eval_shape(kind.update, state, matrices, step_size, momentum_decay), absent)
    if not isinstance(result, tuple) or len(result) != 2:
        raise PartError(
            f"{method_name} returned {_described(result)}; it must be a tuple: the steps, and the state after them."
        )
    steps, after = result
    expected = {name: matrix.shape for name, matrix in matrices.items()}
    if not isinstance(steps, dict) or {name: jnp.shape(step) for name, step in steps.items()} != expected:
        raise PartError(
            f"{method_name} returned the steps {_described(steps)}; there must be one for each weight, {expected}."
        )
    if _described(after) != _described(state):
        raise PartError(
            f"{method_name} returned the state {_described(after)}; it must be like that of init, {_described(state)}."
        )


def check_applied(structure: Structure, name: str, weights: Collection[str], applied: Collection[str]) -> None:
    """Raises PartError unless `name` is a weight that `structure.apply` has not applied yet: gradients need each of them once."""
    method_name = f"{type(structure).__name__}.apply"
    if name not in weights:
        raise PartError(
            f"{method_name} uses the weight {name!r}, which weight_shapes does not have (it has {', '.join(weights)})."
        )
    if name in applied:
        raise PartError(f"{method_name} uses the weight {name!r} twice; every weight must be applied exactly once.")


def check_all_applied(structure: Structure, weights: Collection[str], applied: Collection[str]) -> None:
    """Raises PartError if `structure.apply` has not applied one of the weights."""
    if unused := [name for name in weights if name not in applied]:
        raise PartError(f"{type(structure).__name__}.apply does not use the weight {unused[0]!r} of weight_shapes.")


def tried(method_name: str, call: Callable[[], T], absent: Sequence[str] = ()) -> T:
    """The result of a method's call.

    Args:
      method_name: class and method, "MLP.apply".
      call: calls it.
      absent: a note for each argument that is None, for the message where the method uses one.

    Raises:
      PartError: it fails.
    """
    try:
        return call()
    except PartError:
        raise
    except Exception as error:
        if isinstance(error, NotImplementedError) and str(error) == method_name:
            raise PartError(f"{method_name} is not implemented.") from error
        notes: Sequence[str] = ()
        if isinstance(error, AssertionError) or "None" in str(error):
            notes = absent
        elif isinstance(error, _TRACED):
            notes = ("JAX traces it without values: use jnp.where instead of `if`, and neither float() nor NumPy",)
        first = next(iter(str(error).splitlines()), "").rstrip(".")
        clear = first and isinstance(error, TypeError | ValueError)  # a KeyError's message is only the key
        reason = first if clear else f"{type(error).__name__}: {first}".rstrip(": ")
        noted = f" ({'; '.join(notes)})" if notes else ""
        raise PartError(f"{method_name} failed: {reason}{noted}.") from error


def _same_shape(method_name: str, given: str, result: Any, shape: Shape, meaning: str = "") -> None:
    if not hasattr(result, "shape") or result.shape != shape:
        got = result.shape if hasattr(result, "shape") else _described(result)
        raise PartError(f"{method_name} returned shape {got} {given}; it must be {meaning}{shape}.")
    if not _is_floating(result):
        raise PartError(f"{method_name} returned {result.dtype} {given}; it must be floating point.")


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _described(tree: Any) -> str:
    """The structure of a tree, with dtypes and shapes of its leaves."""
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)).replace("'", "")
