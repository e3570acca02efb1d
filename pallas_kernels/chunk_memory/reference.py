"""The definition of a memory's chunkwise recurrence: token by token, with explicit gradients of its weights."""

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BEGINS, Segments, Window
from pallas_kernels.chunk_memory.bound import SMALLEST
from pallas_kernels.chunk_memory.chunk import Objective, Structure
from pallas_kernels.newton_schulz.reference import Triple, newton_schulz

Weights = dict[str, jax.Array]


def chunk_memory(
    structure: Structure,
    objective: Objective,
    weights: Weights,
    momenta: Weights | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: dict[str, jax.Array],
    chunk_size: int,
    triples: tuple[Triple, ...] | None,
    every: int,
    step_bound: float | None,
    horizon: float,
    norm_bound: float | None,
    window: Window | None,
    segments: Segments | None,
    norm: dict[str, jax.Array] | None,
) -> tuple[jax.Array, Weights, Weights | None]:
    """`api.chunk_memory`, one token after another. Gates by name, including those without effect."""
    batch, time = q.shape[:2]
    real, resets, initial = jnp.ones((batch, time), bool), jnp.zeros((batch, time), bool), weights
    if segments is not None:
        real = segments.real > 0
        begins = jnp.repeat(segments.marks == BEGINS, chunk_size, axis=1)
        resets = begins & (jnp.arange(time) % chunk_size == 0)
        if segments.start is not None:
            initial = {name: jnp.broadcast_to(w, weights[name].shape) for name, w in segments.start.items()}
    past = 0
    if window is not None:  # its tokens come first
        past = window.keys.shape[2]
        join = lambda x, y: jnp.concatenate([x.swapaxes(1, 2).astype(y.dtype), y], axis=1)
        k, v = join(window.keys, k), join(window.values, v)
        floor = jnp.zeros(window.keys.shape[:3]) if window.floor is None else window.floor
        gates = gates | {"floor": join(floor, gates["floor"])}
        real = jnp.concatenate([window.real, real], axis=1)
    matmul = lambda w: lambda name, h: jnp.matmul(h, w[name].T, precision=jax.lax.Precision.HIGHEST)

    def gradient(
        w: Weights, k: jax.Array, v: jax.Array, threshold: jax.Array | None, norm: Weights | None
    ) -> tuple[Weights, jax.Array]:
        """∇ℓ, and the first-order decrease of the loss down to the target."""
        out = lambda w: structure.apply(matmul(w), k[None], k[None], norm)
        of_token = None if threshold is None else threshold[None]
        loss = lambda out: objective.loss(out, v[None], of_token)[0]
        fall = jnp.maximum(jnp.sum(jax.grad(loss)(out(w)) * (out(w) - v)), 0.0)
        return jax.grad(lambda w: loss(out(w)))(w), fall

    def within(w: jax.Array) -> jax.Array:
        if norm_bound is None:
            return w
        square, most = jnp.sum(w * w), norm_bound * w.shape[0] ** 0.5
        over = square > most**2
        return jnp.where(over, most / jnp.sqrt(jnp.where(over, square, 1.0)), 1.0) * w

    def head(
        weights: Weights,
        momenta: Weights | None,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        gates: dict[str, jax.Array],
        initial: Weights,
        real: jax.Array,
        resets: jax.Array,
        norm: Weights | None,
    ) -> tuple[jax.Array, Weights, Weights | None]:
        c = gates["window_weights"].shape[-1]

        def bounded(
            size: jax.Array | float,
            w: Weights,
            s: Weights | None,
            start: Weights,
            t: jax.Array,
            g: Weights,
            fall: tuple[jax.Array, jax.Array],
        ) -> jax.Array:
            """η' from η, see `bound`. fall: a_t and n_t."""
            assert step_bound is not None
            a, n = fall
            inner = lambda x, y: jax.tree.reduce(jnp.add, jax.tree.map(lambda x, y: jnp.sum(x * y), x, y))
            change = jax.tree.map(jnp.subtract, w, start)
            most = step_bound / horizon * a
            if s is not None:
                theta = gates["momentum_decay"][t]
                change = jax.tree.map(lambda x, s: x + horizon * theta * s, change, s)
            square = inner(g, g)
            size = jnp.where(
                square >= SMALLEST, jnp.minimum(size, most / jnp.where(square >= SMALLEST, square, 1.0)), size
            )
            return size * jnp.where(n >= SMALLEST, 1.0 + inner(g, change) / jnp.where(n >= SMALLEST, n, 1.0), 1.0)

        def token(
            state: tuple[Weights, Weights | None, Weights], t: jax.Array
        ) -> tuple[tuple[Weights, Weights | None, Weights], jax.Array]:
            w, s, start = state
            w = jax.tree.map(lambda first, w: jnp.where(resets[t], first, w), initial, w)
            s = jax.tree.map(lambda s: jnp.where(resets[t], 0.0, s), s)
            begins = t % chunk_size == 0
            w, s = jax.tree.map(lambda x: jnp.where(begins, within(x), x), (w, s))
            start = jax.tree.map(lambda new, old: jnp.where(begins, new, old), w, start)
            total = jax.tree.map(jnp.zeros_like, w)
            a = n = jnp.zeros_like(gates["floor"][0])
            for j in range(c):
                i = jnp.maximum(t + past - j, 0)
                seen = (t + past >= j) & real[i]
                threshold = gates["threshold"][i] if "threshold" in gates else None  # there is no window then
                g, fall = gradient(start, k[i], v[i], threshold, norm)
                scale = jnp.where(seen, gates["window_weights"][t, j], 0.0)
                total = jax.tree.map(lambda total, g, scale=scale: total + scale * g, total, g)
                a, n = a + scale * fall, n + scale * (fall + gates["floor"][i])
            size = gates["step_size"][t] if triples is None else 1.0
            if step_bound is not None:
                size = bounded(size, w, s, start, t, total, (a, n))
            steps = jax.tree.map(lambda g: -size * g, total)
            if s is not None:
                steps = s = jax.tree.map(lambda s, x: gates["momentum_decay"][t] * s + x, s, steps)
            if triples is not None:
                writes = jnp.where((t % chunk_size + 1) % every == 0, gates["step_size"][t], 0.0)
                steps = jax.tree.map(lambda x: writes * newton_schulz(x, len(triples), triples), steps)
            w = jax.tree.map(lambda w, x: gates["retention"][t] * w + x, w, steps)
            y = structure.apply(matmul(w), q[t][None], q[t][None], norm)[0]
            # Padding changes nothing.
            return jax.tree.map(lambda new, old: jnp.where(real[t + past], new, old), (w, s, start), state), y

        (weights, momenta, _), y = jax.lax.scan(token, (weights, momenta, weights), jnp.arange(q.shape[0]))
        return y, weights, momenta

    over_heads = jax.vmap(head, in_axes=(0, 0, 1, 1, 1, 1, 0, None, None, 0), out_axes=(1, 0, 0))
    wide = lambda x: x.astype(jnp.float32)
    arrays = (*jax.tree.map(wide, (weights, momenta, q, k, v, gates, initial)), real, resets)
    everything = (*arrays, norm)
    y, weights, momenta = jax.vmap(over_heads, in_axes=(*[0] * len(arrays), None))(*everything)
    return y.astype(q.dtype), weights, momenta
