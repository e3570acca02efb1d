"""A scan whose tokens are divided over devices, each with a part of the sequence, for rules whose state passes linearly.

A row w of a linear memory (`MemoryRule.is_linear`) becomes w P + b over any number of tokens, with the same P [D, D] for all rows.
Each device runs its tokens once, from a memory that has the value's rows, which start at zero, and D more rows, which start at the
identity and whose values are zero. At the end the first are B, the others P; and the outputs of the others, z_t, are what the
outputs y_t lack: M z_t, where M is the memory before the part. So the devices exchange only P and B, once, and

    M_1 = M_0 P_0 + B_0,  M_2 = M_1 P_1 + B_1, …        y_t + M_i z_t

are the memory before each part and its outputs. The cost of a part is that of D more channels of the values.

Where a segment starts, the first rows start again at M_0, the learned start, and the others at zero: what comes before the part has
no effect on what follows. Whether the first token of a part starts one depends on the last token of the part before it.
"""

import jax
import jax.numpy as jnp

from atlasjax.memory.fast_weights.init import init_state
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.rule import ScanCall
from atlasjax.memory.tokens import Tokens

_PRECISION = jax.lax.Precision.HIGHEST


def scan_part(
    rule: MemorySpec, axes: tuple[str, ...], run: ScanCall[MemoryParams, MemoryState],
    params: MemoryParams, state: MemoryState | None, tokens: Tokens,
) -> tuple[jax.Array, MemoryState]:  # fmt: skip
    """The part of one device, inside a `shard_map` that divides the tokens over `axes`.

    Args:
      rule: one that is not `undivided`.
      axes: mesh axes; their devices, in order, have the parts of the sequence in order.
      run: (params, state, q, k, v, gates, segment_ids) → (y, state) for the tokens of one device.
      params, state: as in `memory.scan`. The state is that before the whole sequence.
      tokens: this device's.

    Returns:
      y of this device's tokens, and the state after the whole sequence.
    """
    q, _, v, _, segment_ids = tokens
    before = init_state(rule, params, batch_size=q.shape[0]) if state is None else state
    ((name, M),) = before.memory.items()
    out, channels = M.shape[-2:]
    identity = jnp.broadcast_to(jnp.eye(channels, dtype=M.dtype), (*M.shape[:2], channels, channels))
    # Only the product with P may carry M_0 in, or each device would count it once more.
    start = before._replace(memory={name: jnp.concatenate([jnp.zeros_like(M), identity], axis=2)})
    fresh = params.weights[name]
    wide = params._replace(
        weights={name: jnp.concatenate([fresh, jnp.zeros((len(fresh), channels, channels), fresh.dtype)], 1)}
    )
    me, last_segment = jax.lax.axis_index(axes), before.segment
    if segment_ids is not None:
        last_ids = jax.lax.all_gather(segment_ids[:, -1].astype(before.segment.dtype), axes)  # [devices, batch]
        start = start._replace(segment=jnp.where(me == 0, before.segment, last_ids[me - 1]))
        last_segment = last_ids[-1]
    # Values of zero: these rows show what the part does to any memory, P.
    no_values = jnp.zeros((*v.shape[:-1], channels), v.dtype)
    y, after = run(wide, start, *tokens._replace(v=jnp.concatenate([v, no_values], axis=-1)))

    ends = jax.lax.all_gather(after.memory[name], axes)  # [devices, batch, heads, out + channels, channels]

    def over_a_part(M: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.matmul(M, end[:, :, out:], precision=_PRECISION) + end[:, :, :out], M

    last, starts = jax.lax.scan(over_a_part, M.astype(ends.dtype), ends)
    mine = starts[me]
    rest = jnp.einsum("bhoi,bthi->btho", mine, y[..., out:].astype(mine.dtype), precision=_PRECISION)
    return (y[..., :out] + rest).astype(q.dtype), before._replace(memory={name: last}, segment=last_segment)
