"""Fresh parameters and states of a `SoftmaxRule`, and checks of both."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from atlasjax import check
from atlasjax.memory.call_checks import check_output
from atlasjax.memory.check import check_floating, check_shape
from atlasjax.memory.part_checks import check_softmax_choices
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.softmax.spec import SoftmaxSpec
from atlasjax.memory.softmax.state import SoftmaxParams, SoftmaxState, Tail


def init_params(rule: SoftmaxSpec, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int) -> SoftmaxParams:
    """Initial learned parameters. W1 of an MLP is normal with variance 1 / fan-in, because at zero its gradients would vanish.

    Args:
      rule: the softmax rule.
      key: a PRNG key.
      num_heads: number of heads, ≥ 1.
      key_dim: size of a query or key.
      value_dim: size of a value.

    Raises:
      ValueError: a size is less than one, key_dim ≠ value_dim for an MLP memory, which has a residual, or a part of the rule
        returns a wrong shape.
    """
    check_softmax_choices(rule, value_dim)
    check_output(rule.structure, key_dim, value_dim)
    weights = jax.vmap(lambda k: rule.structure.init(k, 1, value_dim))(jax.random.split(key, num_heads))
    weights.pop(rule.inner)
    return SoftmaxParams(weights, num_heads, key_dim, value_dim)


def init_state(
    rule: SoftmaxSpec,
    params: SoftmaxParams,
    *,
    batch_size: int,
    max_length: int | None = None,
    dtype: jnp.dtype | None = None,
) -> SoftmaxState:
    """A fresh memory for every batch element: an empty cache, W1 at its learned start.

    Args:
      rule: the softmax rule.
      params: from `init_params`, or trained; they have been checked.
      batch_size: number of batch elements.
      max_length: capacity of a full cache in tokens. Ignored with `cache_window`, which determines the size.
      dtype: dtype of the state. None means float32, or that of wider parameters.

    Raises:
      ValueError: max_length is missing or not an integer ≥ 1 for a full cache.
    """
    if rule.cache_window is None:
        if max_length is None:
            raise ValueError(
                "init_state: max_length is None, but this softmax memory keeps every token (cache_window=None): "
                "give the maximum number of tokens."
            )
        check.integer("init_state", "max_length", max_length)
    heads = next(iter(params.weights.values())).shape[0] if params.weights else params.num_heads
    if dtype is None:
        dtype = wide_dtype(*[w.dtype for w in params.weights.values()])
    return empty_state(rule, params, batch_size, heads, max_length or 0, dtype)


def empty_state(
    rule: SoftmaxSpec, params: SoftmaxParams, batch: int, heads: int, length: int, dtype: jnp.dtype
) -> SoftmaxState:
    """`init_state` without checks. `length`: entries of a full cache, 0 for a call from a fresh memory."""
    entries = length if rule.cache_window is None else rule.cache_window
    width, pending, tail = rule.width(params.value_dim), rule.pending, rule.window - 1 + rule.pending
    full = lambda value, *shape: jnp.full((batch, heads, *shape), value, dtype)
    weights = {name: jnp.broadcast_to(w.astype(dtype), (batch, *w.shape)) for name, w in params.weights.items()}
    has_momentum = rule.optimizer.has_momentum
    return SoftmaxState(
        keys=full(0.0, entries, params.key_dim),
        coefficients=full(0.0, entries, width),
        momentum=full(0.0, entries, width) if has_momentum else None,
        decay=full(0.0, entries),
        num_tokens=jnp.zeros((batch,), jnp.int32),
        weights=weights,
        weights_momentum=jax.tree.map(jnp.zeros_like, weights) if has_momentum else None,
        tail=Tail(
            keys=full(0.0, tail, params.key_dim),
            values=full(0.0, tail, params.value_dim),
            preactivations=None if rule.has_constant_gradient else full(0.0, tail, width),
            retention=full(1.0, pending),
            step_size=full(0.0, pending),
            momentum_decay=full(1.0, pending),
            window_weights=full(0.0, pending, rule.window),
        ),
        position=jnp.zeros((batch,), jnp.int32),
        segment=jnp.full((batch,), -1, jnp.int32),
    )


def check_params(rule: SoftmaxSpec, params: SoftmaxParams, where: str) -> None:
    """Raises an error that names the leaf if `params` does not belong to this rule."""
    if not isinstance(params, SoftmaxParams):
        raise TypeError(f"params must be a SoftmaxParams, got {type(params).__name__}.")
    shapes = dict(rule.structure.weight_shapes(1, params.value_dim))
    shapes.pop(rule.inner)
    if sorted(params.weights) != sorted(shapes):
        raise ValueError(
            f"params.weights: a softmax memory {rule.structure!r} has weights {sorted(shapes)}, got {sorted(params.weights)}."
        )
    for name, shape in shapes.items():
        check_shape(f"params.weights[{name!r}]", params.weights[name], ("heads", *shape), where)
        check_floating(f"params.weights[{name!r}]", params.weights[name], where)
