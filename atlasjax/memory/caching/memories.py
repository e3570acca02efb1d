"""The operations that a cached rule needs from its inner rule: a `MemoryRule`, whose memory is matrices, or a `SoftmaxRule`.

A softmax memory is cached as the terms of its sums: keys k_i, coefficients a_i and ρ_i of its segment's tokens (zeros in empty
places, which add nothing), and W1 of an MLP. Each is read separately, with its own Z, and its gate weighs the result.
"""

from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory import softmax
from atlasjax.memory.blocks import dot
from atlasjax.memory.caching.rule import CachedRule
from atlasjax.memory.fast_weights import check, engine
from atlasjax.memory.fast_weights import state as base
from atlasjax.memory.fast_weights.chunk import Soup
from atlasjax.memory.fast_weights.reference import reference_scan as base_reference
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.gates import Gates, Weights
from atlasjax.memory.softmax import SoftmaxParams, SoftmaxRule
from atlasjax.memory.softmax import check as softmax_check
from atlasjax.memory.softmax import decode as softmax_decode
from atlasjax.memory.softmax import engine as softmax_engine
from atlasjax.memory.softmax.reference import reference_scan as softmax_reference
from atlasjax.memory.softmax.sums import divide, partial_sums
from atlasjax.memory.softmax.tape import Cache


def check_call(rule: CachedRule, params: Any, q: Any, k: Any, v: Any, gates: Any, *, time: bool, where: str) -> None:
    """The inner rule's check of a call without a state."""
    checker: Any = softmax_check if isinstance(rule.rule, SoftmaxRule) else check
    checker.check_call(rule.rule, params, None, q, k, v, gates, time=time, where=where)


def sizes(rule: CachedRule, params: Any) -> tuple[int, int]:
    """(number of heads, key_dim)."""
    if isinstance(params, SoftmaxParams):
        return params.num_heads, params.key_dim
    assert isinstance(rule.rule, MemoryRule)
    return next(iter(params.weights.values())).shape[0], base.infer_key_dim(rule.rule, params)


def init_state(rule: CachedRule, params: Any, batch_size: int) -> Any:
    """A fresh memory. A softmax memory has room for the tokens of one segment."""
    if isinstance(rule.rule, SoftmaxRule):
        return softmax.init_state(rule.rule, params, batch_size=batch_size, max_length=rule.segment_size)
    return base.init_state(rule.rule, params, batch_size=batch_size)


def weights_of(rule: CachedRule, state: Any) -> Weights:
    """θ, the arrays that are cached: name → [batch, heads, …, …]. For a softmax memory, those at the end of a chunk."""
    if isinstance(rule.rule, SoftmaxRule):
        entries = {"keys": state.keys, "coefficients": state.coefficients, "decay": state.decay[..., None]}
        return {**state.weights, **entries}
    return rule.rule.weights(state.memory)


def scan(
    rule: CachedRule, params: Any, state: Any, q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates,
    lengths: jax.Array | None = None, soup: Soup | None = None,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """The inner rule's `scan`. Only the first `lengths` tokens of each row exist."""
    if isinstance(rule.rule, SoftmaxRule):
        assert soup is None
        return softmax_engine.xla_scan(rule.rule, params, state, q, k, v, gates, lengths=lengths)
    return engine.xla_scan(rule.rule, params, state, q, k, v, gates, lengths=lengths, soup=soup)


def step(
    rule: CachedRule, params: Any, state: Any, q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates, soup: Soup | None
) -> tuple[jax.Array, Any]:
    """The inner rule's `step`."""
    if isinstance(rule.rule, SoftmaxRule):
        assert soup is None
        return softmax_decode.xla_step(rule.rule, params, state, q, k, v, gates)
    return engine.xla_step(rule.rule, params, state, q, k, v, gates, soup=soup)


def reference_scan(rule: CachedRule, *args: Any) -> tuple[jax.Array, Any]:
    """The inner rule's definition."""
    run: Any = softmax_reference if isinstance(rule.rule, SoftmaxRule) else base_reference
    return run(rule.rule, *args)


def softmax_branch(rule: SoftmaxRule, dtype: jnp.dtype, weights: Weights, q: jax.Array) -> jax.Array:
    """The branch (output without residual) of one cached softmax memory of one head: q [n, key_dim] → [n, value_dim]."""
    cache = Cache(weights["keys"], weights["coefficients"], None, weights["decay"][:, 0])
    part = partial_sums(rule, q, cache, jnp.ones((1, cache.keys.shape[0]), bool), dtype)
    h = divide(part.value, part.mass if rule.normalized else None)
    linear = lambda name, x: h if name == rule.inner else dot(x, weights[name].T, dtype)
    return rule.structure.apply(linear, q, jnp.zeros_like(q) if rule.structure.residual else None, None)


def value_dim(rule: MemoryRule | SoftmaxRule, weights: Weights) -> int:
    """Size of a read, determined from weights [..., out, in]."""
    outermost = next(iter(rule.structure.weight_shapes(1, 1)))
    if outermost in weights:
        return weights[outermost].shape[-2]
    return weights["coefficients"].shape[-1]
