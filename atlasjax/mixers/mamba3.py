"""The recurrence of Mamba-3 (Lahoti et al. 2026, arXiv 2603.15569): a rotated state, the exponential-trapezoidal rule, rank R.

    φ_t = φ_{t−1} + π Δ_t tanh(rate_t)                              angles of a head, modulo 2π; 0 before the first token
    k_{t,r} = Rot(φ_t) B_{t,r},  q_{t,r} = Rot(φ_t) C_{t,r}         r = 1 … R
    h_t = α_t h_{t−1} + Δ_t Σ_r (λ_t x_{t,r} k_{t,r}ᵀ + (1 − λ_t) α_t x_{t−1,r} k_{t−1,r}ᵀ),  α_t = exp(Δ_t A_t)
    y_{t,r} = h_t q_{t,r} + D x_{t,r}                               h: [head_dim, state]

R = 1 is the SISO form, and R > 1 the MIMO form, of which each token writes R pairs and reads R times. With λ = 1 and without
rotation it is the recurrence of Mamba-2 (`mamba2.ssd`). `rotations` and `rotate` make k and q, `trapezoidal_scan` is the rest.

The recurrence is `rules.mamba3` on `atlasjax.memory`: a window of two tokens, with step size Δ and window weights (λ, (1 − λ) α).
A linear rule on U_t = h_t + Δ_{t+1} (1 − λ_{t+1}) x_t k_tᵀ would do as well: y_t is U_t q_t without the part that is added here. On
a CPU the window takes 1.1 times as long forward, and 0.9 to 1.05 times with the backward pass. It needs neither the gates of the
token after nor a difference, and Memory Caching knows windows.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check, memory, rules
from atlasjax.memory.check import check_ids, check_sizes
from atlasjax.memory.products import wide_dtype
from atlasjax.mixers.matrix_memory import step_or_scan, zero_start
from atlasjax.mixers.shapes import check_shapes

_ROTATIONS = {"rate": "batch time angles", "delta": "batch time heads", "start": "batch heads angles"}

_AXES = {
    "x": "batch time rank heads head_dim",
    "delta": "batch time heads",
    "A": "batch time heads",
    "blend": "batch time heads",
    "B": "batch time rank heads state",
    "C": "batch time rank heads state",
    "D": "heads",
}


def rotations(
    rate: Float[Array, "batch time angles"],
    delta: Float[Array, "batch time heads"],
    start: Float[Array, "batch heads angles"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time heads angles"]:
    """φ of every token in turns, φ / 2π, within [−1/2, 1/2]. It is 0 before the first token of a segment.

    Sums are taken modulo one turn in pairs of pairs, so that their error does not grow with φ, and with the number of tokens only
    as its logarithm. Plain float32 sums of a thousand turns are 6e-5 of a turn apart.

    Args:
      rate: angles per unit of Δ, before tanh; floating point.
      delta: step sizes Δ ≥ 0.
      start: the last token's φ of the piece before. None means zeros.
      segment_ids: integers ≥ 0. The first segment continues from `start`.

    Returns:
      float32 (float64 for float64 inputs). That of the last token is the next piece's `start`.

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    check_shapes("mamba3.rotations", _ROTATIONS, optional=("start",), rate=rate, delta=delta, start=start)
    if segment_ids is not None:
        check_ids(segment_ids, rate.shape[:2], "mamba3.rotations")
    return _rotations(rate, delta, start, segment_ids)


@jax.jit
def _rotations(rate: jax.Array, delta: jax.Array, start: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array:
    wide = wide_dtype(rate.dtype)
    turns = _wrapped(0.5 * delta.astype(wide)[..., None] * jnp.tanh(rate.astype(wide))[:, :, None])
    if start is not None:
        turns = turns.at[:, 0].set(_wrapped(turns[:, 0] + start.astype(wide)))
    if segment_ids is None:
        return jax.lax.associative_scan(lambda a, b: _wrapped(a + b), turns, axis=1)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))[..., None, None]

    def joined(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(b[1], b[0], _wrapped(a[0] + b[0])), a[1] | b[1]

    return jax.lax.associative_scan(joined, (turns, begins), axis=1)[0]


def _wrapped(turns: jax.Array) -> jax.Array:
    """Without whole turns. The derivative of jnp.round is zero, so this one's is one."""
    return turns - jnp.round(turns)


def rotate(
    x: Float[Array, "batch time rank heads state"], turns: Float[Array, "batch time heads angles"]
) -> Float[Array, "batch time rank heads state"]:
    """Rot(φ) x for turns = φ / 2π, in x's dtype: each angle rotates a pair of channels, the other channels stay as they are.

    As published, the pairs are (2i, 2i + 1) for rank 1, and (i, i + state / 2) for a higher rank. They matter for public weights,
    and for nothing else.

    Raises:
      TypeError, ValueError: invalid arguments; state is odd or less than two channels for each angle.
    """
    axes = {"x": "batch time rank heads state", "turns": "batch time heads angles"}
    sizes = check_shapes("mamba3.rotate", axes, x=x, turns=turns)
    state, count = sizes["state"], sizes["angles"]
    if state % 2 or state < 2 * count:
        raise ValueError(f"mamba3.rotate: x has {state} channels, must be even and at least 2 · {count} angles.")
    wide = wide_dtype(x.dtype)
    angle = 2 * math.pi * turns.astype(wide)[:, :, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # Pairs as an axis. The derivatives of slices of channels would be padded and added: on a CPU three times the backward pass.
    halves, numbers, shape = (-1, -2, (state // 2, 2)) if sizes["rank"] == 1 else (-2, -1, (2, state // 2))
    turning, rest = jnp.split(x.astype(wide).reshape(*x.shape[:-1], *shape), (count,), axis=numbers)
    first, second = jnp.moveaxis(turning, halves, 0)
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=halves)
    return jnp.concatenate([turned, rest], axis=numbers).reshape(x.shape).astype(x.dtype)


def init_state(batch_size: int, heads: int, head_dim: int, state_dim: int, rank: int = 1) -> memory.MemoryState:
    """The state of `trapezoidal_scan` before the first token: h is zero {"W": [batch, heads, head_dim, state]}, and so are the keys
    and values of the token before, [batch, heads, rank, …], float32.

    Raises:
      ValueError: a size is not an integer ≥ 1.
    """
    sizes = {"batch_size": batch_size, "heads": heads, "head_dim": head_dim, "state_dim": state_dim}
    check_sizes("mamba3.init_state", **sizes, rank=rank)
    return memory.init_state(rules.mamba3(rank=rank), zero_start(heads, head_dim, state_dim), batch_size=batch_size)


def trapezoidal_scan(
    x: Float[Array, "batch time rank heads head_dim"],
    delta: Float[Array, "batch time heads"],
    A: Float[Array, "batch time heads"],
    blend: Float[Array, "batch time heads"],
    B: Float[Array, "batch time rank heads state"],
    C: Float[Array, "batch time rank heads state"],
    D: Float[Array, " heads"] | None = None,
    *,
    state: memory.MemoryState | memory.CachedState | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
    rule: memory.Rule | None = None,
    gates: memory.Gates = memory.Gates(),
    partition: memory.Partition | None = None,
) -> tuple[Float[Array, "batch time rank heads head_dim"], memory.MemoryState | memory.CachedState]:
    """The recurrence over a sequence, with keys B and queries C that are rotated already. Splitting a sequence into several calls
    does not change the result.

    Args:
      x: the values, floating point; any time ≥ 1.
      delta: step sizes Δ ≥ 0.
      A: rates ≤ 0 of each token.
      blend: λ in [0, 1]: the share of the token itself, the rest is of the token before.
      B: keys, one for each value.
      C: queries.
      D: the skip connection, or None.
      state: the state before the first token. None means zeros.
      segment_ids, max_segments, implementation: as in `memory.scan`.
      rule: None, or for rank 1 a `memory.CachedRule` around `rules.mamba3()`.
      gates: those that a `memory.CachedRule` adds.
      partition: as in `memory.scan`.

    Returns:
      y: like x, in x's dtype, and the final state of the rule, float32 (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: invalid arguments, before anything is traced.
    """
    sizes = check_shapes("trapezoidal_scan", _AXES, optional=("D",), x=x, delta=delta, A=A, blend=blend, B=B, C=C, D=D)
    check.instance("trapezoidal_scan", "gates", gates, memory.Gates)
    for name in ("retention", "step_size", "window_weights"):
        if getattr(gates, name) is not None:
            raise ValueError(
                f"trapezoidal_scan: gates.{name} is given; it must be None, as it follows from delta, A and blend."
            )
    if segment_ids is not None:
        check_ids(segment_ids, x.shape[:2], "trapezoidal_scan")
    rank = sizes["rank"]
    if rank > 1 and rule is not None:
        raise ValueError(f"trapezoidal_scan: rule must be None for x of rank {rank}, got {rule!r}.")
    rule = rules.mamba3(rank=rank) if rule is None else rule
    wide = wide_dtype(x.dtype)
    delta, A, blend = (z.astype(wide) for z in (delta, A, blend))
    gates = _gates(gates, rank, delta, jnp.exp(delta * A), blend)
    # R pairs of a token are R tokens in a row, of which only the first decays (`_gates`).
    q, k, v = (z.reshape(z.shape[0], z.shape[1] * rank, *z.shape[3:]).astype(x.dtype) for z in (C, B, x))
    params = zero_start(sizes["heads"], sizes["head_dim"], sizes["state"])
    ids = segment_ids if segment_ids is None or rank == 1 else jnp.repeat(segment_ids, rank, axis=1)
    y, after = step_or_scan(
        rule, params, state, q, k, v, gates, segment_ids=ids, max_segments=max_segments,
        implementation=implementation, partition=partition,
    )  # fmt: skip
    y = y.reshape(x.shape).astype(wide)
    if rank > 1:
        # A read in the row of pair r sees the pairs up to r; the recurrence reads after all of them.
        y = y + _later_pairs(x.astype(wide), delta * blend, B.astype(wide), C.astype(wide))
    if D is not None:
        y = y + D.astype(wide)[None, None, None, :, None] * x.astype(wide)
    return y.astype(x.dtype), after


def _gates(gates: memory.Gates, rank: int, delta: jax.Array, decay: jax.Array, blend: jax.Array) -> memory.Gates:
    """The gates of `rules.mamba3`, whose tokens are the R pairs of each token here: [batch, time · R, heads(, R + 1)].

    The first one decays the memory and writes all pairs of the token before, which are then the last R in the window.
    """
    batch, time, heads = delta.shape
    first = (jnp.arange(rank) == 0)[:, None]
    each = lambda z: jnp.broadcast_to(z, (batch, time, rank, heads)).reshape(batch, time * rank, heads)
    before = each(jnp.where(first, ((1 - blend) * decay)[:, :, None], 0.0))[..., None]
    return gates._replace(
        retention=each(jnp.where(first, decay[:, :, None], 1.0)),
        step_size=each(delta[:, :, None]),
        window_weights=jnp.concatenate([each(blend[:, :, None])[..., None], *[before] * rank], axis=-1),
    )


def _later_pairs(x: jax.Array, weight: jax.Array, B: jax.Array, C: jax.Array) -> jax.Array:
    """The reads of a token's pairs that are written after read r, which the recurrence leaves out."""
    highest = jax.lax.Precision.HIGHEST
    later = jnp.triu(jnp.ones((x.shape[2], x.shape[2]), x.dtype), 1)
    scores = jnp.einsum("btrhn,btjhn->bthrj", C, B, precision=highest) * weight[..., None, None] * later
    return jnp.einsum("bthrj,btjhp->btrhp", scores, x, precision=highest)


def reference(
    x: Float[Array, "batch time rank heads head_dim"],
    delta: Float[Array, "batch time heads"],
    A: Float[Array, "batch time heads"],
    blend: Float[Array, "batch time heads"],
    B: Float[Array, "batch time rank heads state"],
    C: Float[Array, "batch time rank heads state"],
    D: Float[Array, " heads"] | None = None,
) -> tuple[Float[Array, "batch time rank heads head_dim"], Float[Array, "batch heads head_dim state"]]:
    """The definition, token by token, from a zero state; arguments as in `trapezoidal_scan`.

    Returns:
      y: like x, in x's dtype, and the final h, [batch, heads, head_dim, state], float32 (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: invalid arguments.
    """
    check_shapes("mamba3.reference", _AXES, optional=("D",), x=x, delta=delta, A=A, blend=blend, B=B, C=C, D=D)
    return _reference(x, delta, A, blend, B, C, D)


@jax.jit
def _reference(
    x: jax.Array, delta: jax.Array, A: jax.Array, blend: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    dtype, highest = x.dtype, jax.lax.Precision.HIGHEST
    x, delta, A, blend, B, C = (z.astype(wide_dtype(dtype)) for z in (x, delta, A, blend, B, C))
    batch, _, _, heads, head_dim = x.shape

    def token(carry, t):
        h, before = carry
        pairs = jnp.einsum("brhp,brhn->bhpn", x[:, t], B[:, t], precision=highest)
        decay = jnp.exp(delta[:, t] * A[:, t])
        own, old = delta[:, t] * blend[:, t], delta[:, t] * (1 - blend[:, t]) * decay
        scaled = lambda weight, z: weight[..., None, None] * z
        h = scaled(decay, h) + scaled(old, before) + scaled(own, pairs)
        y = jnp.einsum("bhpn,brhn->brhp", h, C[:, t], precision=highest)
        return (h, pairs), y if D is None else y + D[:, None] * x[:, t]

    zero = jnp.zeros((batch, heads, head_dim, B.shape[-1]), x.dtype)
    (h, _), y = jax.lax.scan(token, (zero, zero), jnp.arange(x.shape[1]))
    return jnp.swapaxes(y, 0, 1).astype(dtype), h
