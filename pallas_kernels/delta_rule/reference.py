"""The definition of the (gated) delta rule, token by token."""

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BEGINS, Segments


def delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, decay: jax.Array | None, initial: jax.Array,
    segments: Segments | None = None, chunk_size: int = 1,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """W_t = α_t W_{t−1} + β_t (v_t − α_t W_{t−1} k_t) k_tᵀ, y_t = W_t q_t. Shapes as in `api.delta_rule`."""
    alpha = jnp.ones_like(beta) if decay is None else decay
    matmul = lambda w, x: jnp.einsum("bhvd,bhd->bhv", w, x, precision=jax.lax.Precision.HIGHEST)

    def token(w: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, beta, alpha, *begins = x
        if segments is not None:
            w = jnp.where(begins[0][:, None, None, None], segments.start, w)
        w = alpha[..., None, None] * w
        u = beta[..., None] * (v - matmul(w, k))
        w = w + u[..., :, None] * k[..., None, :]
        return w, matmul(w, q)

    xs = tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, beta, alpha))
    if segments is not None:
        begins = jnp.repeat(segments.marks == BEGINS, chunk_size, axis=1) & (jnp.arange(q.shape[1]) % chunk_size == 0)
        xs = (*xs, begins.T)
    final, y = jax.lax.scan(token, initial.astype(jnp.float32), xs)
    return jnp.moveaxis(y, 0, 1).astype(q.dtype), final
