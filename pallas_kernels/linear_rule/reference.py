"""The definition of the linear rules, token by token."""

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BEGINS, Arrays, Segments


def linear_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, removal: Arrays | None, initial: jax.Array,
    *, delta: bool, decay_first: bool, segments: Segments | None = None, chunk_size: int = 1,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """W_t = W_{t−1} Diag(α_t) + β_t (v_t k_tᵀ − (W̃_t r_t) s_tᵀ), y_t = W_t q_t. Arguments as in `api.linear_rule`."""
    matmul = lambda w, x: jnp.einsum("bhvd,bhd->bhv", w, x, precision=jax.lax.Precision.HIGHEST)
    outer = lambda x, y: x[..., :, None] * y[..., None, :]
    removed = (k, k) if delta else removal

    def token(w: jax.Array, x: tuple[Arrays, Arrays | None, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        (q, k, v, decay, beta), removed, begins = x
        if segments is not None and begins is not None:
            w = jnp.where(begins[:, None, None, None], segments.start, w)
        decayed = decay[..., None, :] * w
        write = outer(v, k)
        if removed is not None:
            write = write - outer(matmul(decayed if decay_first else w, removed[0]), removed[1])
        w = decayed + beta[..., None, None] * write
        return w, matmul(w, q)

    by_time = lambda x: jnp.moveaxis(x.astype(jnp.float32), 1, 0)
    begins = None
    if segments is not None:
        begins = jnp.repeat(segments.marks == BEGINS, chunk_size, axis=1) & (jnp.arange(q.shape[1]) % chunk_size == 0)
        begins = begins.T
    xs = jax.tree.map(by_time, ((q, k, v, decay, beta), removed))
    final, y = jax.lax.scan(token, initial.astype(jnp.float32), (*xs, begins))
    return jnp.moveaxis(y, 0, 1).astype(q.dtype), final
