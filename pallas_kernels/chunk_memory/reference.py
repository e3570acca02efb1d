"""The chunkwise recurrence of a memory token by token, with gradients of its weights: the definition."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.newton_schulz.reference import Triple, newton_schulz

Weights = dict[str, jax.Array]


def chunk_memory(
    structure: Any,
    objective: Any,
    weights: Weights,
    momenta: Weights | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: dict[str, jax.Array],
    chunk_size: int,
    triples: tuple[Triple, ...] | None,
    every: int,
) -> tuple[jax.Array, Weights, Weights | None]:
    """As `api.chunk_memory`, one token after another; gates by name, those without effect given too."""
    matmul = lambda w: lambda name, h: jnp.matmul(h, w[name].T, precision=jax.lax.Precision.HIGHEST)

    def gradient(w: Weights, k: jax.Array, v: jax.Array) -> Weights:
        loss = lambda w: objective.loss(structure.apply(matmul(w), k[None], k[None], None), v[None], None)[0]
        return jax.grad(loss)(w)

    def head(weights: Weights, momenta: Weights | None, q: Any, k: Any, v: Any, gates: Any) -> Any:
        c = gates["window"].shape[-1]

        def token(state: Any, t: Any) -> Any:
            w, s, start = state
            start = jax.tree.map(lambda new, old: jnp.where(t % chunk_size == 0, new, old), w, start)
            steps = jax.tree.map(jnp.zeros_like, w)
            size = gates["step_size"][t] if triples is None else 1.0
            for j in range(c):
                seen = t - j >= 0
                g = gradient(start, k[jnp.maximum(t - j, 0)], v[jnp.maximum(t - j, 0)])
                scale = jnp.where(seen, size * gates["window"][t, j], 0.0)
                steps = jax.tree.map(lambda total, g, scale=scale: total - scale * g, steps, g)
            if s is not None:
                steps = s = jax.tree.map(lambda s, x: gates["momentum"][t] * s + x, s, steps)
            if triples is not None:
                writes = jnp.where((t % chunk_size + 1) % every == 0, gates["step_size"][t], 0.0)
                steps = jax.tree.map(lambda x: writes * newton_schulz(x, len(triples), triples), steps)
            w = jax.tree.map(lambda w, x: gates["retention"][t] * w + x, w, steps)
            y = structure.apply(matmul(w), q[t][None], q[t][None], None)[0]
            return (w, s, start), y

        (weights, momenta, _), y = jax.lax.scan(token, (weights, momenta, weights), jnp.arange(q.shape[0]))
        return y, weights, momenta

    over_heads = jax.vmap(head, in_axes=(0, 0, 1, 1, 1, 1), out_axes=(1, 0, 0))
    wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y, weights, momenta = jax.vmap(over_heads)(*jax.tree.map(wide, (weights, momenta, q, k, v, gates)))
    return y.astype(q.dtype), weights, momenta
