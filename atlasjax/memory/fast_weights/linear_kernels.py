"""Linear and delta rules with the kernels of `pallas_kernels`: which kernel a rule has, what it supports, and the call.

`delta_rule` runs delta rules with one decay for each head, or none. `linear_rule` runs delta rules whose memory decays after the
removal, or with a decay for each channel, or that remove at keys of their own (RWKV-7, Gated DeltaNet-2, Comba), and linear
attention with a decay for each channel. Linear attention with one decay for each head is a memory with constant gradients, which
`chunk_memory` runs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory.fast_weights.linear import removal_of
from atlasjax.memory.fast_weights.packed import layout, pack
from atlasjax.memory.fast_weights.scan import state_after
from atlasjax.memory.fast_weights.slots import Carry
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.tokens import Tokens
from pallas_kernels.delta_rule import MOST_CHANNELS, delta_rule
from pallas_kernels.linear_rule import linear_rule


def kernel_of(rule: MemorySpec) -> str | None:
    """The kernel for a linear rule, or None if it is not linear or `chunk_memory` runs it."""
    if not rule.is_linear:
        return None
    has_channels = rule.retention.gate == "channel"
    if rule.objective.gradient_is_value:
        return "linear_rule" if has_channels else None
    decays_last = rule.retention.gate is not None and not rule.retention.decay_first
    return "linear_rule" if has_channels or decays_last or rule.objective.own_keys else "delta_rule"


def unsupported(weight: jax.Array) -> dict[str, bool]:
    """Reason → whether it applies, for a linear rule with a kernel. weight: W [heads, value_dim, feature_dim]."""
    return {
        f"W is {weight.shape}, the kernel supports at most {MOST_CHANNELS} channels": max(weight.shape[1:])
        > MOST_CHANNELS,
    }


def scan(
    implementation: str,
    rule: MemorySpec,
    params: MemoryParams,
    before: MemoryState,
    tokens: Tokens,
    max_segments: int | None,
    chunk_size: int,
) -> tuple[jax.Array, MemoryState]:
    """`xla_scan` of a rule with a kernel by "pallas_tpu" or "pallas_gpu", in chunks that do not affect the result."""
    (q, k, v, gates, segment_ids), packed = tokens, None
    if segment_ids is not None:
        where = layout(rule, before, tokens, max_segments, chunk_size)
        packed = pack(rule, params, before, where, tokens, chunk_size)
        q, k, v, gates, _ = packed.tokens
    wide = jnp.float32
    by_head = lambda x: jax.vmap(rule.features.apply, in_axes=(0, 2), out_axes=2)(params.coefficients, x.astype(wide))
    query, key = (x.astype(wide) if rule.features.is_identity else by_head(x) for x in (q, k))
    beta = None if gates.step_size is None else gates.step_size.astype(wide)
    own = {name: getattr(gates, name).astype(wide) for name in rule.objective.own_keys}
    removed, keys = removal_of(rule, key, beta, own), None
    if removed is not None:
        beta = removed.rate
        keys = (removed.key, removed.write) if own else None  # otherwise r = s = k
    if packed is not None and not rule.objective.uses_step_size:
        # Places of the grid without a token write nothing.
        beta = jnp.broadcast_to(packed.segments.real[..., None], q.shape[:3])
    assert beta is not None
    query, key = query.astype(q.dtype), key.astype(q.dtype)
    options: dict[str, Any] = {"initial": before.memory["W"], "chunk_size": chunk_size}
    if packed is not None:
        options["segments"] = packed.segments._replace(start=packed.segments.start["W"])
    if kernel_of(rule) == "delta_rule":
        y, memory = delta_rule(query, key, v, beta, gates.retention, implementation=implementation, **options)
    else:
        # The kernel has one form, with a decay per channel.
        decay = jnp.ones((), wide) if gates.retention is None else gates.retention.astype(wide)
        if decay.ndim < 4:
            decay = jnp.broadcast_to(decay[..., None], query.shape)
        y, memory = linear_rule(
            query, key, v, decay, beta, keys, delta=rule.objective.gradient_is_error,
            decay_first=rule.retention.decay_first, implementation=implementation, **options,
        )  # fmt: skip
    if packed is None:
        return y, before._replace(memory={"W": memory})
    after = Carry({"W": memory}, before.momentum, None, {"W": memory})
    return packed.pick(y), state_after(rule, before, after, where, tokens)
