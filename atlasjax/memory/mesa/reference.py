"""The definition of a mesa memory: token by token, with the matrix of each token formed and solved directly. Slow on purpose."""

import jax
import jax.numpy as jnp

from atlasjax.memory import grid, meshes
from atlasjax.memory.mesa.init import init_state
from atlasjax.memory.mesa.spec import MesaSpec
from atlasjax.memory.mesa.state import MesaParams, MesaState
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.tokens import Tokens


def reference_scan(
    rule: MesaSpec, params: MesaParams, state: MesaState | None, tokens: Tokens
) -> tuple[jax.Array, MesaState]:
    """`memory.reference`. The solver of the rule has no effect."""
    dtype, (batch, time) = wide_dtype(tokens.q.dtype), tokens.q.shape[:2]
    wide = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    fresh = jax.tree.map(wide, init_state(rule, params, batch_size=batch, dtype=dtype))
    start = fresh if state is None else grid.widened(state, dtype)
    matrix = jax.vmap(jnp.diag)(rule.floor + jax.nn.softplus(params.ridge.astype(dtype)))
    ids = tokens.segment_ids
    ids = jnp.broadcast_to(start.segment[:, None], (batch, time)) if ids is None else ids

    def token(state: MesaState, xs: tuple[Tokens, jax.Array]) -> tuple[MesaState, jax.Array]:
        (q, k, v, gates, _), segment = xs
        state = grid.choose((segment != state.segment) & (state.segment >= 0), fresh, state)
        assert gates.retention is not None
        assert gates.step_size is not None
        alpha, beta = gates.retention[..., None, None], gates.step_size[..., None, None]
        H = alpha * state.key_sums + beta * jnp.einsum("bha,bhc->bhac", k, k)
        G = alpha * state.value_sums + beta * jnp.einsum("bhv,bha->bhva", v, k)
        x = jnp.linalg.solve(H + matrix[None], q[..., None])[..., 0]
        return MesaState(H, G, segment), jnp.einsum("bhva,bha->bhv", G, x)

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens._replace(segment_ids=None), ids))
    with jax.default_matmul_precision("highest"):
        last, y = meshes.scan(token, start, jax.tree.map(wide, by_time))
    return jnp.moveaxis(y, 0, 1).astype(tokens.q.dtype), last
