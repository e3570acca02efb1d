"""Checks of a rule's parts, once per rule and sizes: what they return must have the shapes that the engines expect.

A user's part is first met here, for two tokens and without any compilation. Otherwise a mistake in it would be found by JAX while
it traces a loop, with a message about the loop.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from atlasjax.memory.axes.structures import Structure
from atlasjax.memory.gates import Weights

if TYPE_CHECKING:
    from atlasjax.memory.fast_weights.rule import MemoryRule
    from atlasjax.memory.fast_weights.state import MemoryParams
    from atlasjax.memory.softmax.rule import SoftmaxRule

_TOKENS = 2
Shape = tuple[int, ...]


def check_choices(rule: "MemoryRule", params: "MemoryParams", key_dim: int) -> None:
    """Raises ValueError if a part of the rule returns another shape than it should. Arrays may be traced; only shapes are used.

    Args:
      rule: the memory rule.
      params: parameters whose own shapes have been checked.
      key_dim: size of a key.
    """
    # In the structure's order: JAX sorts the names of a dictionary.
    weights = tuple((name, params.weights[name].shape[1:]) for name in rule.structure.weight_shapes(1, 1))
    coefficients = None if params.coefficients is None else params.coefficients.shape[1:]
    wide = jax.dtypes.canonicalize_dtype(jnp.float64)
    _check(rule, weights, coefficients, key_dim, wide)


def check_initial(rule: "MemoryRule", key: jax.Array, feature_dim: int, value_dim: int) -> None:
    """Raises ValueError if the rule's structure or features return other initial values than they should."""
    structure, wanted = rule.structure, rule.structure.weight_shapes(feature_dim, value_dim)
    weights = jax.eval_shape(lambda key: structure.init(key, feature_dim, value_dim), key)
    floating = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    right = isinstance(weights, dict) and all(map(floating, weights.values()))
    if not right or {name: w.shape for name, w in weights.items()} != dict(wanted):
        raise ValueError(
            f"{type(structure).__name__}.init returned {_described(weights)}; it should be a dict of floating-point arrays with "
            f"the shapes of weight_shapes, {dict(wanted)}."
        )
    coefficients = rule.features.init()
    if coefficients is not None and not floating(coefficients):
        raise ValueError(
            f"{type(rule.features).__name__}.init returned {coefficients!r}; it should be None or a floating-point array."
        )


@functools.lru_cache(maxsize=1024)
def _check(
    rule: "MemoryRule",
    weights: tuple[tuple[str, Shape], ...],
    coefficients: Shape | None,
    key_dim: int,
    dtype: jnp.dtype,
) -> None:
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    _check_features(rule, array(_TOKENS, key_dim), None if coefficients is None else array(*coefficients))
    _check_writing(rule, dict(weights), dtype)


@functools.lru_cache(maxsize=1024)
def check_softmax_choices(rule: "SoftmaxRule", value_dim: int) -> None:
    """`check_choices` of a softmax rule, whose features have any number of channels."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    _check_writing(rule, rule.structure.weight_shapes(value_dim, value_dim), dtype)


def _check_writing(rule: "MemoryRule | SoftmaxRule", weights: Mapping[str, Shape], dtype: jnp.dtype) -> None:
    """Checks structure, objective, retention and optimizer. weights: name → (out, in), the outermost first."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    matrices = {name: array(*shape) for name, shape in weights.items()}
    value_dim = next(iter(weights.values()))[0]
    _check_structure(rule, matrices, array, value_dim)
    _check_objective(rule, array, value_dim)
    _check_retention(rule, matrices, array)
    if not rule.optimizer.is_implicit:
        _check_optimizer(rule, matrices, array, value_dim)


def _check_features(rule: "MemoryRule", keys: Any, coefficients: Any) -> None:
    kind, key_dim = rule.features, keys.shape[-1]
    features = jax.eval_shape(kind.apply, coefficients, keys)
    size = kind.dim(key_dim)
    _same_shape(f"{type(kind).__name__}.apply", f"for keys of shape {keys.shape}", features, (_TOKENS, size))


def _check_structure(rule: "MemoryRule | SoftmaxRule", matrices: dict[str, Any], array: Any, value_dim: int) -> None:
    kind, told = rule.structure, f"{type(rule.structure).__name__}.apply"
    feature_dim = list(matrices.values())[-1].shape[1]

    def apply(matrices: dict[str, jax.Array], x: jax.Array, skip: jax.Array, vector: jax.Array) -> jax.Array:
        applied: Weights = {}

        def linear(name: str, h: jax.Array) -> jax.Array:
            check_applied(kind, name, matrices, applied)
            applied[name] = h
            if jnp.ndim(h) != 2 or h.shape != (_TOKENS, matrices[name].shape[1]):
                raise ValueError(
                    f"{told}: the weight {name!r} of shape {matrices[name].shape} is applied to an array of shape {jnp.shape(h)}; "
                    f"it should be ({_TOKENS}, {matrices[name].shape[1]}) for {_TOKENS} tokens."
                )
            return h @ matrices[name].T

        norm = {"scale": vector, "bias": vector} if kind.norm else None
        out = kind.apply(linear, x, skip if kind.residual else None, norm)
        check_all_applied(kind, matrices, applied)
        return out

    out = jax.eval_shape(apply, matrices, array(_TOKENS, feature_dim), array(_TOKENS, value_dim), array(value_dim))
    _same_shape(told, f"for features of shape {(_TOKENS, feature_dim)}", out, (_TOKENS, value_dim))


def _check_objective(rule: "MemoryRule | SoftmaxRule", array: Any, value_dim: int) -> None:
    kind = rule.objective
    if kind.removes:
        return
    out, threshold = array(_TOKENS, value_dim), array(_TOKENS) if kind.uses_threshold else None
    loss = jax.eval_shape(kind.loss, out, out, threshold)
    _same_shape(
        f"{type(kind).__name__}.loss", f"for outputs {out.shape}", loss, (_TOKENS,), "one number for each token, "
    )


def _check_retention(rule: "MemoryRule | SoftmaxRule", matrices: dict[str, Any], array: Any) -> None:
    kind = rule.retention
    for matrix in matrices.values():
        given = f"for a weight of shape {matrix.shape}"
        if kind.gate is not None or not kind.is_linear:
            alpha = array(matrix.shape[1]) if kind.gate == "channel" else array()
            decayed = jax.eval_shape(kind.decay, matrix, alpha)
            _same_shape(f"{type(kind).__name__}.decay", given, decayed, matrix.shape)
        if kind.has_map:
            for method in ("start", "map"):
                mapped = jax.eval_shape(getattr(kind, method), matrix)
                _same_shape(f"{type(kind).__name__}.{method}", given, mapped, matrix.shape)
            if rule.step_bound is not None:
                change = jax.eval_shape(kind.change_along, matrix, matrix)
                _same_shape(f"{type(kind).__name__}.change_along", given, change, ())


def _check_optimizer(rule: "MemoryRule | SoftmaxRule", matrices: dict[str, Any], array: Any, value_dim: int) -> None:
    kind, told = rule.optimizer, f"{type(rule.optimizer).__name__}.update"
    state = jax.eval_shape(kind.init, matrices)
    if any(not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(state)):
        raise ValueError(
            f"{type(kind).__name__}.init returned the state {_described(state)}; all its arrays should be floating point, also "
            "a count."
        )
    step_size = array(value_dim, 1) if kind.per_channel else array()
    momentum_decay = array() if kind.has_momentum else None
    result = jax.eval_shape(kind.update, state, matrices, step_size, momentum_decay)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{told} returned {_described(result)}; it should be a tuple: the steps, and the state after them."
        )
    steps, after = result
    expected = {name: matrix.shape for name, matrix in matrices.items()}
    if not isinstance(steps, dict) or {name: jnp.shape(step) for name, step in steps.items()} != expected:
        raise ValueError(
            f"{told} returned the steps {_described(steps)}; there should be one for each weight, {expected}."
        )
    if _described(after) != _described(state):
        raise ValueError(
            f"{told} returned the state {_described(after)}; it should be like that of init, {_described(state)}."
        )


def check_applied(structure: Structure, name: str, weights: Weights, applied: Weights) -> None:
    """Raises ValueError unless `name` is a weight that `structure.apply` has not applied yet: gradients need each of them once."""
    told = f"{type(structure).__name__}.apply"
    if name not in weights:
        raise ValueError(
            f"{told} uses the weight {name!r}, which weight_shapes does not have (it has {', '.join(weights)})."
        )
    if name in applied:
        raise ValueError(f"{told} uses the weight {name!r} twice; every weight should be applied exactly once.")


def check_all_applied(structure: Structure, weights: Weights, applied: Weights) -> None:
    """Raises ValueError if `structure.apply` has not applied one of the weights."""
    if unused := [name for name in weights if name not in applied]:
        raise ValueError(f"{type(structure).__name__}.apply does not use the weight {unused[0]!r} of weight_shapes.")


def _same_shape(told: str, given: str, result: Any, shape: Shape, meaning: str = "") -> None:
    if not hasattr(result, "shape") or result.shape != shape:
        got = result.shape if hasattr(result, "shape") else _described(result)
        raise ValueError(f"{told} returned shape {got} {given}; it should be {meaning}{shape}.")


def _described(tree: Any) -> str:
    """The structure of a tree, with dtypes and shapes of its leaves."""
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)).replace("'", "")
