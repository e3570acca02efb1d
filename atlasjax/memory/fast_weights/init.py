"""Fresh parameters and states of a `MemoryRule`, and checks of both."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from atlasjax.memory.call_checks import check_output
from atlasjax.memory.check import check_floating, check_shape
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.part_checks import PartsWithFeatures, check_choices, check_parts
from atlasjax.memory.products import wide_dtype


def init_params(
    rule: PartsWithFeatures, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int
) -> MemoryParams:
    """Initial learned parameters: M_0 of each head, coefficients of the feature map, and the norm inside the memory.

    A matrix memory starts at zero. The weights of an MLP are normal with variance 1 / fan-in.

    Args:
      rule: the memory rule.
      key: a PRNG key.
      num_heads: number of heads, ≥ 1.
      key_dim: size of a query or key.
      value_dim: size of a value.

    Raises:
      ValueError: a size is less than one, key_dim ≠ value_dim for a memory with a residual, or a part of the rule returns a wrong
        shape.
    """
    check_parts(rule, key_dim, value_dim, key)
    check_output(rule.structure, key_dim, value_dim)
    feature_dim = rule.features.dim(key_dim)
    weights = jax.vmap(lambda k: rule.structure.init(k, feature_dim, value_dim))(jax.random.split(key, num_heads))
    initial = rule.features.init()
    coefficients = None if initial is None else jnp.tile(jnp.asarray(initial), (num_heads, *(1,) * initial.ndim))
    norm = None
    if rule.structure.norm:
        shape = num_heads, value_dim
        norm = {"scale": jnp.ones(shape, jnp.float32), "bias": jnp.zeros(shape, jnp.float32)}
    return MemoryParams(weights, coefficients, norm)


def init_state(
    rule: MemorySpec, params: MemoryParams, *, batch_size: int, max_length: int | None = None
) -> MemoryState:
    """A fresh memory for every batch element: M = M_0, S = 0, an empty window.

    Args:
      rule: the memory rule.
      params: parameters from `init_params`, possibly trained; they have been checked (`check_params`).
      batch_size: number of batch elements.
      max_length: no effect, because the size of the state does not depend on the number of tokens read.
    """
    num_heads, _, value_dim = rule.sizes(params)
    dtype = wide_dtype(next(iter(params.weights.values())).dtype)
    expand = lambda w: jnp.broadcast_to(w, (batch_size, *w.shape))
    memory = jax.tree.map(expand, rule.start({name: w.astype(dtype) for name, w in params.weights.items()}))
    window = rule.window - 1
    keys = values = thresholds = count = None
    if window:
        key_dim = infer_key_dim(rule, params)
        keys = jnp.zeros((batch_size, num_heads, window, key_dim), dtype)
        values = jnp.zeros((batch_size, num_heads, window, value_dim), dtype)
        count = jnp.zeros((batch_size,), jnp.int32)
        if rule.objective.uses_threshold:
            thresholds = jnp.ones((batch_size, num_heads, window), dtype)
    constant = rule.has_constant_gradient
    return MemoryState(
        memory=memory,
        # Copies, because a state whose leaves share a buffer could not be donated to a jitted call.
        chunk_start=None if constant or rule.chunk_size == 1 else jax.tree.map(jnp.copy, memory),
        momentum=jax.tree.map(jnp.copy, rule.start_momentum(memory)),
        window_keys=keys,
        window_values=values,
        window_thresholds=thresholds,
        window_count=count,
        position=None if constant or rule.chunk_size == 1 else jnp.zeros((batch_size,), jnp.int32),
        segment=jnp.full((batch_size,), -1, jnp.int32),
    )


def infer_key_dim(rule: PartsWithFeatures, params: MemoryParams) -> int:
    """The key size, from the input size of the parameters' innermost matrix."""
    innermost = list(rule.structure.weight_shapes(1, 1))[-1]
    try:
        return rule.features.key_dim(params.weights[innermost].shape[-1])
    except ValueError as error:
        raise ValueError(f"params.weights[{innermost!r}]: {error}") from None


def check_params(rule: PartsWithFeatures, params: MemoryParams, where: str) -> None:
    """Raises TypeError or ValueError if `params` does not belong to this rule. The message names the leaf."""
    if not isinstance(params, MemoryParams) or not isinstance(params.weights, dict):
        raise TypeError(
            f"{where}: params must be MemoryParams with a dictionary of weights, got {type(params).__name__}."
        )
    expected = list(rule.structure.weight_shapes(1, 1))
    if sorted(params.weights) != sorted(expected):
        raise ValueError(f"params.weights: {rule.structure!r} has weights {expected}, got {sorted(params.weights)}.")
    for name in (expected[0], expected[-1]):
        check_shape(f"params.weights[{name!r}]", params.weights[name], ("heads", "out", "in"), where)
    heads, value_dim = params.weights[expected[0]].shape[:2]
    feature_dim = params.weights[expected[-1]].shape[-1]
    for name, shape in rule.structure.weight_shapes(feature_dim, value_dim).items():
        _check_leaf(f"params.weights[{name!r}]", params.weights[name], (heads, *shape), where)
    initial = rule.features.init()
    if (initial is None) != (params.coefficients is None):
        raise ValueError(
            f"params.coefficients: {rule.features!r} needs {'none' if initial is None else initial.shape}, "
            f"got {None if params.coefficients is None else params.coefficients.shape}."
        )
    if initial is not None:
        _check_leaf("params.coefficients", params.coefficients, (heads, *initial.shape), where)
    if rule.structure.norm:
        if not isinstance(params.norm, dict) or sorted(params.norm) != ["bias", "scale"]:
            raise ValueError(f"params.norm: {rule.structure!r} needs scale and bias, got {params.norm!r}.")
        for name, leaf in params.norm.items():
            _check_leaf(f"params.norm[{name!r}]", leaf, (heads, value_dim), where)
    check_choices(rule, params, infer_key_dim(rule, params))


def _check_leaf(name: str, x: object, shape: tuple[int, ...], where: str) -> None:
    check_floating(name, check_shape(name, x, shape, where), where)
