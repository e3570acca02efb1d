"""The arrays of a softmax memory: learned parameters and the recurrent state."""

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from atlasjax import check
from atlasjax.memory.check import check_floating, check_output, check_shape
from atlasjax.memory.choices import check_softmax_choices
from pallas_kernels.arguments import wide_dtype

if TYPE_CHECKING:
    from atlasjax.memory.softmax.rule import SoftmaxRule


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["num_heads", "key_dim", "value_dim"]
)
@dataclasses.dataclass(frozen=True)
class SoftmaxParams:
    """Learned (outer-loop) parameters. Every leaf has the heads axis first. The sizes are static. A matrix memory has no leaf.

    Attributes:
      weights: the learned start of W1, {"W1": [heads, value_dim, expansion · value_dim]}, float32; {} for a matrix memory.
      num_heads, key_dim, value_dim: sizes.
    """

    weights: dict[str, Float[Array, "heads value_dim width"]]
    num_heads: int
    key_dim: int
    value_dim: int


class Tail(NamedTuple):
    """The window − 1 tokens up to t', oldest first, then the tokens after t' (pending = b − 1 slots): tail = window − 1 + pending.

    Empty slots hold zeros and gates without effect. Gates exist only for the tokens after t'.

    Attributes:
      keys: [batch, heads, tail, key_dim].
      values: [batch, heads, tail, value_dim].
      preactivations: h_{t'}(k) of those keys, [batch, heads, tail, width]. None if gradients do not need it.
      retention, step_size, momentum_decay: [batch, heads, pending]. Ones if the rule has no such gate.
      window_weights: [batch, heads, pending, window]. Ones if the rule has no such gate.
    """

    keys: Float[Array, "batch heads tail key_dim"]
    values: Float[Array, "batch heads tail value_dim"]
    preactivations: Float[Array, "batch heads tail width"] | None
    retention: Float[Array, "batch heads pending"]
    step_size: Float[Array, "batch heads pending"]
    momentum_decay: Float[Array, "batch heads pending"]
    window_weights: Float[Array, "batch heads pending window"]


class SoftmaxState(NamedTuple):
    """The state of a softmax memory. t' is the last token before the current chunk.

    float32 (float64 for float64 inputs) and int32; every leaf has the batch axis first. The number of entries is `cache_window`,
    or max_length for a full cache. Entries are in order of time: with a cache window they end at the last slot, in a
    full cache they begin at slot 0.

    Attributes:
      keys: k_i, [batch, heads, entries, key_dim].
      coefficients: a_i(t'), [batch, heads, entries, width].
      momentum: s_i(t'), like coefficients, None without momentum.
      decay: ρ_i(t'), [batch, heads, entries].
      num_tokens: number of tokens up to t', [batch], at most `entries` with a cache window. If it exceeds them in a full
        cache, further outputs are NaN.
      weights: W1 at t', {"W1": [batch, heads, value_dim, width]}; {} for a matrix memory.
      weights_momentum: momentum of W1, None without momentum.
      tail: the tokens that steps still write to, and those of the unfinished chunk.
      position: number of tokens of the current chunk read so far, in [0, chunk_size), [batch]; 0 if the chunk size has no effect.
      segment: segment id of the last token, [batch], −1 if no token had one.
    """

    keys: Float[Array, "batch heads entries key_dim"]
    coefficients: Float[Array, "batch heads entries width"]
    momentum: Float[Array, "batch heads entries width"] | None
    decay: Float[Array, "batch heads entries"]
    num_tokens: Int[Array, " batch"]
    weights: dict[str, Float[Array, "batch heads value_dim width"]]
    weights_momentum: dict[str, Float[Array, "batch heads value_dim width"]] | None
    tail: Tail
    position: Int[Array, " batch"]
    segment: Int[Array, " batch"]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


def init_params(
    rule: "SoftmaxRule", key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int
) -> SoftmaxParams:
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
    rule: "SoftmaxRule",
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
    rule: "SoftmaxRule", params: SoftmaxParams, batch: int, heads: int, length: int, dtype: jnp.dtype
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


def has_scaling(rule: "SoftmaxRule") -> bool:
    """Whether the coefficients of old entries change: decay or momentum."""
    return rule.retention.gate is not None or rule.optimizer.has_momentum


def check_params(rule: "SoftmaxRule", params: SoftmaxParams, where: str) -> None:
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
