"""The state-space dual of Mamba-2 (Dao & Gu 2024, §6): the selective scan with one scalar A per head.

    h_t = exp(Δ_t A) h_{t−1} + Δ_t x_t B_tᵀ        h: [head_dim, state]
    y_t = h_t C_t + D x_t

This is linear attention with a scalar retention, so it runs on `atlasjax.memory` with k = B, v = x, q = C, step size Δ and
retention exp(Δ A). The heads of a group share B and C, which are repeated for each head. Computing the products B Cᵀ once per group
instead saved 10 to 30 % of the time on a CPU when measured, which does not justify a second engine.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check, memory, rules
from atlasjax.memory.check import check_sizes
from atlasjax.memory.products import wide_dtype
from atlasjax.mixers.matrix_memory import step_or_scan, zero_start
from atlasjax.mixers.shapes import check_shapes

RULE = rules.retnet()

_AXES = {
    "x": "batch time heads head_dim",
    "delta": "batch time heads",
    "A": "heads",
    "B": "batch time groups state",
    "C": "batch time groups state",
    "D": "heads",
}


def init_state(batch_size: int, heads: int, head_dim: int, state_dim: int) -> memory.MemoryState:
    """The state before the first token: zeros {"W": [batch, heads, head_dim, state]}, float32.

    Raises:
      ValueError: a size is not an integer ≥ 1.
    """
    check_sizes("mamba2.init_state", batch_size=batch_size, heads=heads, head_dim=head_dim, state_dim=state_dim)
    return memory.init_state(RULE, zero_start(heads, head_dim, state_dim), batch_size=batch_size)


def ssd(
    x: Float[Array, "batch time heads head_dim"],
    delta: Float[Array, "batch time heads"],
    A: Float[Array, " heads"],
    B: Float[Array, "batch time groups state"],
    C: Float[Array, "batch time groups state"],
    D: Float[Array, " heads"] | None = None,
    *,
    state: memory.MemoryState | memory.CachedState | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
    rule: memory.Rule = RULE,
    gates: memory.Gates = memory.Gates(),
    partition: memory.Partition | None = None,
) -> tuple[Float[Array, "batch time heads head_dim"], memory.MemoryState | memory.CachedState]:
    """The recurrence over a sequence. Splitting a sequence into several calls does not change the result.

    Args:
      x: the input, [batch, time, heads, head_dim], floating point; any time ≥ 1.
      delta: step sizes Δ ≥ 0, [batch, time, heads].
      A: [heads], negative.
      B: [batch, time, groups, state]; head h reads group h · groups // heads.
      C: like B.
      D: the skip connection, [heads], or None.
      state: the state before the first token. None means zeros.
      segment_ids, max_segments, implementation: as in `memory.scan`.
      rule: `RULE`, or a `memory.CachedRule` around it.
      gates: those that a `memory.CachedRule` adds.
      partition: as in `memory.scan`.

    Returns:
      y: like x, in x's dtype, and the final state of the rule, float32 (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: invalid arguments, before anything is traced.
    """
    sizes = _check("ssd", x, delta, A, B, C, D)
    check.instance("ssd", "gates", gates, memory.Gates)
    heads, groups = sizes["heads"], sizes["groups"]
    wide = wide_dtype(x.dtype)
    delta, A = delta.astype(wide), A.astype(wide)
    # B writes and C reads: they are the keys and the queries of linear attention.
    k, q = (jnp.repeat(z, heads // groups, axis=2).astype(x.dtype) for z in (B, C))
    gates = gates._replace(retention=jnp.exp(delta * A[None, None]), step_size=delta)
    params = zero_start(heads, sizes["head_dim"], sizes["state"])
    y, after = step_or_scan(
        rule, params, state, q, k, x, gates, segment_ids=segment_ids, max_segments=max_segments,
        implementation=implementation, partition=partition,
    )  # fmt: skip
    if D is not None:
        y = (y.astype(wide) + D.astype(wide)[None, None, :, None] * x.astype(wide)).astype(x.dtype)
    return y, after


def reference(
    x: Float[Array, "batch time heads head_dim"],
    delta: Float[Array, "batch time heads"],
    A: Float[Array, " heads"],
    B: Float[Array, "batch time groups state"],
    C: Float[Array, "batch time groups state"],
    D: Float[Array, " heads"] | None = None,
) -> tuple[Float[Array, "batch time heads head_dim"], Float[Array, "batch heads head_dim state"]]:
    """The definition, token by token, from a zero state; arguments as in `ssd`.

    Returns:
      y: like x, in x's dtype, and the final h, [batch, heads, head_dim, state], float32 (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    _check("mamba2.reference", x, delta, A, B, C, D)
    return _reference(x, delta, A, B, C, D)


@jax.jit
def _reference(
    x: jax.Array, delta: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    (batch, time, heads, head_dim), dtype = x.shape, x.dtype
    wide = wide_dtype(dtype)
    x, delta, A, B, C = (z.astype(wide) for z in (x, delta, A, B, C))
    B, C = (jnp.repeat(z, heads // z.shape[2], axis=2) for z in (B, C))
    highest = jax.lax.Precision.HIGHEST

    def token(h, t):
        write = jnp.einsum("bh,bhp,bhn->bhpn", delta[:, t], x[:, t], B[:, t], precision=highest)
        h = jnp.exp(delta[:, t] * A)[..., None, None] * h + write
        y = jnp.einsum("bhpn,bhn->bhp", h, C[:, t], precision=highest)
        return h, y if D is None else y + D[:, None] * x[:, t]

    h, y = jax.lax.scan(token, jnp.zeros((batch, heads, head_dim, B.shape[3]), wide), jnp.arange(time))
    return jnp.swapaxes(y, 0, 1).astype(dtype), h


def _check(where: str, x: object, delta: object, A: object, B: object, C: object, D: object) -> dict[str, int]:
    sizes = check_shapes(where, _AXES, optional=("D",), x=x, delta=delta, A=A, B=B, C=C, D=D)
    if sizes["heads"] % sizes["groups"]:
        raise ValueError(
            f"{where}: B has {sizes['groups']} groups, which do not divide the {sizes['heads']} heads of x."
        )
    return sizes
