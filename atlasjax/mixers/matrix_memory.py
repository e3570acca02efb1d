"""A memory of one matrix for each head that starts at zero, as mixers of state spaces and delta rules have it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlasjax import memory


def zero_start(heads: int, value_dim: int, key_dim: int) -> memory.MemoryParams:
    """A memory with a fixed zero start."""
    return memory.MemoryParams({"W": jnp.zeros((heads, value_dim, key_dim), jnp.float32)}, None, None)


def step_or_scan(
    rule: memory.Rule,
    params: memory.MemoryParams,
    state: memory.MemoryState | memory.CachedState | None,
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gates: memory.Gates,
    **options: Any,
) -> tuple[Float[Array, "batch time heads value_dim"], Any]:
    """`memory.scan` with its keyword arguments `options`, or `memory.step` for a decoded token."""
    # A step compiles no loop. A caller's choice of implementation is for sequences.
    if q.shape[1] > 1 or state is None or options["segment_ids"] is not None or options["implementation"] is not None:
        return memory.scan(rule, params, state, q, k, v, gates, **options)
    y, after = memory.step(rule, params, state, *jax.tree.map(lambda z: z[:, 0], (q, k, v, gates)))
    return y[:, None], after
