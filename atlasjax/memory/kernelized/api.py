"""The functional API of kernel memories: `scan`, `step`, `read`, `reference`, as in `atlasjax.memory.api`."""

import jax
import jax.numpy as jnp

from atlasjax.memory.check import check_segments
from atlasjax.memory.kernelized import check
from atlasjax.memory.kernelized.reference import reference_scan
from atlasjax.memory.kernelized.rule import KernelRule
from atlasjax.memory.kernelized.state import KernelParams, KernelState
from atlasjax.memory.state import Gates


def reference(
    rule: KernelRule,
    params: KernelParams,
    state: KernelState | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    *,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, KernelState]:
    """The definition: token by token over the whole cache, inner gradients from `jax.grad`. Slow; arguments as in `scan`."""
    check.check_call(rule, params, state, q, k, v, gates, time=True, where="memory.reference")
    if segment_ids is not None:
        check_segments(segment_ids, q.shape[1], q, "memory.reference")
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    return reference_scan(rule, params, state, q, k, v, gates, segment_ids)
