"""The write keys of preconditioned DeltaNet (arXiv 2604.21100): keys scaled by the inverse of an estimate of the curvature.

    a_t = α^a_t a_{t−1} + β^a_t k_t ⊙ k_t                                       a_0 = 0
    m_t = exp(−log(x) · r/(1 + |r|)),  r = log(a_t + 10⁻⁶) − c                  each entry in (1/x, x)
    W_t = W̃_t + η_t (v_t − W̃_t k_t)(m_t ⊙ k_t)ᵀ                                 the rules `pgdn` and `pkda`

a is the decayed sum of k kᵀ, of whose curvature only the diagonal is kept. It is a second state, beside the memory.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.check import check_ids
from atlasjax.memory.products import wide_dtype
from atlasjax.mixers.shapes import check_shapes

CENTER = -0.2  # c, initially
_EPS = 1e-6

_AXES = {
    "k": "batch time heads key_dim",
    "step_size": "batch time heads",
    "retention": "batch time heads",
    "center": "heads",
    "state": "batch heads key_dim",
}


def preconditioned_keys(
    k: Float[Array, "batch time heads key_dim"],
    step_size: Float[Array, "batch time heads"],
    retention: Float[Array, "batch time heads"],
    center: Float[Array, " heads"] | float = CENTER,
    *,
    state: Float[Array, "batch heads key_dim"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    largest: float = 1.5,
) -> tuple[Float[Array, "batch time heads key_dim"], Float[Array, "batch heads key_dim"]]:
    """Write keys m ⊙ k for `memory.scan`, where k itself is the read key. Splitting a sequence into calls does not change them.

        keys, a = preconditioned_keys(k, beta_a, alpha_a)
        gates = memory.Gates(retention=alpha, step_size=beta, removal_key=k)
        y, state = memory.scan(rules.pgdn(), params, None, q, keys, v, gates)              # or rules.pkda(), α per channel

    fla: chunk_precond_gated_delta_rule(q, k, v, g_atk, g, beta_atk, beta) and chunk_precond_kda(q, k, v, g, g_atk, beta_atk, beta)
    with g_atk = log α^a, beta_atk = β^a, x = largest and log_atk_scale = center. They scale queries by key_dim^{−1/2}.

    Args:
      k: keys of unit length, [batch, time, heads, key_dim], floating point.
      step_size: β^a ≥ 0, [batch, time, heads], float32.
      retention: α^a in [0, 1], like step_size.
      center: c, the logarithm of the curvature at which m is 1: [heads], or a number for all heads.
      state: a before the first token, [batch, heads, key_dim]. None means zeros.
      segment_ids: integers ≥ 0, [batch, time]. a starts at zero where the id changes. Only without a state.
      largest: x, in (1, 2]. With β ≤ 1 and x ≤ 2 no eigenvalue of a token's transition is below −1.

    Returns:
      m ⊙ k in k's dtype, and a after the last token, float32 (float64 for float64 keys).

    Raises:
      TypeError, ValueError: invalid arguments, before anything is traced.
    """
    where = "curvature.preconditioned_keys"
    number = isinstance(center, int | float)
    given = {name: axes for name, axes in _AXES.items() if name != "center" or not number}
    check_shapes(
        where, given, optional=("state",), k=k, step_size=step_size, retention=retention, center=center, state=state
    )
    if number:
        check.number(where, "center", center)
    check.number(where, "largest", largest, above=1, most=2)
    starts = None
    if segment_ids is not None:
        if state is not None:
            raise ValueError(f"{where}: segment_ids are given with a state; segments start at zero.")
        check_ids(segment_ids, k.shape[:2], where)
        starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return _preconditioned(k, step_size, retention, jnp.asarray(center), state, starts, largest)


@functools.partial(jax.jit, static_argnames="largest")
def _preconditioned(
    k: jax.Array, step_size: jax.Array, retention: jax.Array, center: jax.Array, state: jax.Array | None,
    starts: jax.Array | None, largest: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    wide = wide_dtype(k.dtype)
    keys, alpha = k.astype(wide), retention.astype(wide)
    if starts is not None:
        alpha = jnp.where(starts[..., None], 0.0, alpha)
    a = _decayed_sums(alpha[..., None], step_size.astype(wide)[..., None] * keys * keys, state)
    distance = jnp.log(a + _EPS) - jnp.atleast_1d(center.astype(wide))[None, None, :, None]
    scale = jnp.exp(-math.log(largest) * distance / (1.0 + jnp.abs(distance)))
    return (keys * scale).astype(k.dtype), a[:, -1]


def _decayed_sums(alpha: jax.Array, added: jax.Array, start: jax.Array | None) -> jax.Array:
    """a_t = α_t a_{t−1} + added_t for all t, in log₂(time) steps. alpha: [batch, time, heads, 1]; added: like k."""
    join = lambda first, second: (first[0] * second[0], second[0] * first[1] + second[1])
    # Sums of products: no quotient of decays, whose denominator may be 0 at the start of a segment.
    decays, sums = jax.lax.associative_scan(join, (alpha, added), axis=1)
    return sums if start is None else sums + decays * start[:, None].astype(sums.dtype)
