"""P_t q = Σ_τ k̂_τ ⟨k̂_τ, q⟩ with k̂ = k/‖k‖: a read of linear attention whose values are its keys (TNT Eq. 7)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax.memory.axes import objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Gates
from atlasjax.memory.products import wide_dtype

_SUM = MemoryRule(
    structures.Matrix(), objectives.DotProduct(), optimizer=optimizers.GradientDescent(), retention=retention.Full()
)


def unit(k: Float[Array, "... key_dim"]) -> Float[Array, "... key_dim"]:
    """k/‖k‖, and 0 for a zero key. In at least float32."""
    k = k.astype(wide_dtype(k.dtype))
    square = jnp.sum(k * k, axis=-1, keepdims=True)
    # Twice `where`: the derivative of a square root at 0 is infinite, and 0 · ∞ is NaN.
    some = square > 0
    return jnp.where(some, k * jax.lax.rsqrt(jnp.where(some, square, 1.0)), 0.0)


def project(
    projection: Float[Array, "batch heads key_dim key_dim"] | None,
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
    lengths: Int[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch time heads key_dim"], Float[Array, "batch heads key_dim key_dim"]]:
    """P_t q_t of every token, its own key included, in q's dtype, and P after the last one.

    Args:
      projection: P before the call. None: 0.
      q, k: queries and keys.
      segment_ids, max_segments: where P begins again, as in `memory.scan`; the first segment continues from `projection`.
      lengths: number of tokens in each row; the results of others are 0.
    """
    batch, time, heads, key_dim = q.shape
    params, state = _around(projection, heads, key_dim)
    keys = unit(k).astype(q.dtype)
    gates = Gates(step_size=jnp.ones((batch, time, heads), wide_dtype(q.dtype)))
    y, after = _SUM.scan(params, state, q, keys, keys, gates, segment_ids, max_segments, lengths=lengths)
    if lengths is not None:
        # Queries of padding are NaN otherwise, and as inputs of the local memories they would spread.
        y = jnp.where((jnp.arange(time)[None] < lengths[:, None])[..., None, None], y, 0.0)
    return y, after.memory["W"]


def project_token(
    projection: Float[Array, "batch heads key_dim key_dim"],
    q: Float[Array, "batch heads key_dim"],
    k: Float[Array, "batch heads key_dim"],
) -> tuple[Float[Array, "batch heads key_dim"], Float[Array, "batch heads key_dim key_dim"]]:
    """`project` for one token."""
    params, state = _around(projection, *q.shape[1:])
    assert state is not None
    keys = unit(k).astype(q.dtype)
    gates = Gates(step_size=jnp.ones(q.shape[:-1], wide_dtype(q.dtype)))
    y, after = _SUM.step(params, state, q, keys, keys, gates)
    return y, after.memory["W"]


def read(
    projection: Float[Array, "batch heads key_dim key_dim"], q: Float[Array, "batch time heads key_dim"]
) -> Float[Array, "batch time heads key_dim"]:
    """P q for any queries."""
    params, state = _around(projection, *q.shape[2:])
    assert state is not None
    return _SUM.read(params, state, q)


def _around(
    projection: Float[Array, "batch heads key_dim key_dim"] | None, heads: int, key_dim: int
) -> tuple[MemoryParams, MemoryState | None]:
    """Parameters and state of linear attention with this sum."""
    params = MemoryParams({"W": jnp.zeros((heads, key_dim, key_dim), jnp.float32)}, None, None)
    if projection is None:
        return params, None
    return params, _SUM.init_state(params, batch_size=projection.shape[0])._replace(memory={"W": projection})
