"""The definition of a memory's chunkwise recurrence: token by token, with explicit gradients of its weights."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BEGINS
from pallas_kernels.chunk_memory.bound import SMALLEST
from pallas_kernels.chunk_memory.call import Call, Weights
from pallas_kernels.chunk_memory.chunk import Linear
from pallas_kernels.newton_schulz.reference import newton_schulz

# W, S (None without momentum), and W at the chunk's start
_State = tuple[Weights, Weights | None, Weights]


def chunk_memory(call: Call) -> tuple[jax.Array, Weights, Weights | None]:
    """`api.chunk_memory`, one token after another, for checked arguments."""
    past, sequence = _sequence(call)
    over_heads = jax.vmap(
        lambda *arrays: _Head(call, past, _Sequence(*arrays[2:])).scan(*arrays[:2]),
        in_axes=(0, 0, 1, 1, 1, 1, 0, None, None, 0), out_axes=(1, 0, 0),
    )  # fmt: skip
    wide = lambda x: x.astype(jnp.float32)
    arrays = (*jax.tree.map(wide, (call.weights, call.momenta, *sequence[:5])), sequence.real, sequence.resets)
    y, weights, momenta = jax.vmap(over_heads, in_axes=(*[0] * len(arrays), None))(*arrays, call.norm)
    return y.astype(call.q.dtype), weights, momenta


class _Sequence(NamedTuple):
    """Tokens, gates by name (those without effect included), the weights with which segments begin, and for each token whether it
    is real and whether it begins a segment. The LayerNorm inside the memory is of a head.

    The window's tokens come first in k, v, real and the gate `floor`, so that these are longer than the rest.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gates: dict[str, jax.Array]
    initial: Weights
    real: jax.Array
    resets: jax.Array
    norm: Weights | None


def _sequence(call: Call) -> tuple[int, _Sequence]:
    """The number of tokens of the window before the first one, and the sequence of all heads."""
    batch, time = call.q.shape[:2]
    real, resets, initial = jnp.ones((batch, time), bool), jnp.zeros((batch, time), bool), call.weights
    if (segments := call.segments) is not None:
        real = segments.real > 0
        begins = jnp.repeat(segments.marks == BEGINS, call.chunk_size, axis=1)
        resets = begins & (jnp.arange(time) % call.chunk_size == 0)
        if segments.start is not None:
            initial = {name: jnp.broadcast_to(w, call.weights[name].shape) for name, w in segments.start.items()}
    k, v, gates, past = call.k, call.v, _gates(call), 0
    if (window := call.window) is not None:
        past = window.keys.shape[2]
        join = lambda x, y: jnp.concatenate([x.swapaxes(1, 2).astype(y.dtype), y], axis=1)
        k, v = join(window.keys, k), join(window.values, v)
        floor = jnp.zeros(window.keys.shape[:3]) if window.floor is None else window.floor
        gates = gates | {"floor": join(floor, gates["floor"])}
        real = jnp.concatenate([window.real, real], axis=1)
    return past, _Sequence(call.q, k, v, gates, initial, real, resets, call.norm)


def _gates(call: Call) -> dict[str, jax.Array]:
    ones = call.ones
    given = lambda x, otherwise: otherwise if x is None else x
    return {
        "step_size": call.step_size,
        "retention": given(call.retention, ones),
        "momentum_decay": given(call.momentum_decay, ones),
        "write_size": given(call.write_size, ones),
        "window_weights": given(call.window_weights, ones[..., None]),
        "floor": given(call.floor, 0.0 * ones),
    } | ({} if call.threshold is None else {"threshold": call.threshold})


def _matmul(w: Weights) -> Linear:
    return lambda name, h: jnp.matmul(h, w[name].T, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class _Head:
    """The recurrence of one head. past: tokens of the window before the first one."""

    call: Call
    past: int
    of: _Sequence

    def scan(self, weights: Weights, momenta: Weights | None) -> tuple[jax.Array, Weights, Weights | None]:
        start = (weights, momenta, weights)
        (weights, momenta, _), y = jax.lax.scan(self.token, start, jnp.arange(self.of.q.shape[0]))
        return y, weights, momenta

    def token(self, state: _State, t: jax.Array) -> tuple[_State, jax.Array]:
        call, gates, resets = self.call, self.of.gates, self.of.resets
        w, s, start = state
        w = jax.tree.map(lambda first, w: jnp.where(resets[t], first, w), self.of.initial, w)
        s = jax.tree.map(lambda s: jnp.where(resets[t], 0.0, s), s)
        begins = t % call.chunk_size == 0
        w, s = jax.tree.map(lambda x: jnp.where(begins, self.within(x), x), (w, s))
        start = jax.tree.map(lambda new, old: jnp.where(begins, new, old), w, start)
        total, fall = self.windowed(start, t)
        size = gates["step_size"][t] if call.newton_schulz is None else 1.0
        if call.step_bound is not None:
            size = self.bounded(size, (w, s, start), t, total, fall)
        steps = jax.tree.map(lambda g: -size * g, total)
        if s is not None:
            steps = s = jax.tree.map(lambda s, x: gates["momentum_decay"][t] * s + x, s, steps)
        if (triples := call.newton_schulz) is not None:
            writes = jnp.where((t % call.chunk_size + 1) % call.every == 0, gates["step_size"][t], 0.0)
            steps = jax.tree.map(lambda x: writes * newton_schulz(x, len(triples), triples), steps)
        w = jax.tree.map(lambda w, x: gates["retention"][t] * w + gates["write_size"][t] * x, w, steps)
        q = self.of.q[t][None]
        y = call.structure.apply(_matmul(w), q, q, self.of.norm)[0]
        # Padding changes nothing.
        real = self.of.real[t + self.past]
        return jax.tree.map(lambda new, old: jnp.where(real, new, old), (w, s, start), state), y

    def windowed(self, start: Weights, t: jax.Array) -> tuple[Weights, tuple[jax.Array, jax.Array]]:
        """Σ_j γ_{t,j} ∇ℓ at the chunk's start, and its a_t and n_t (`bounded`)."""
        gates, total = self.of.gates, jax.tree.map(jnp.zeros_like, start)
        a = n = jnp.zeros_like(gates["floor"][0])
        for j in range(gates["window_weights"].shape[-1]):
            i = jnp.maximum(t + self.past - j, 0)
            seen = (t + self.past >= j) & self.of.real[i]
            g, fall = self.gradient(start, i)
            scale = jnp.where(seen, gates["window_weights"][t, j], 0.0)
            total = jax.tree.map(lambda total, g, scale=scale: total + scale * g, total, g)
            a, n = a + scale * fall, n + scale * (fall + gates["floor"][i])
        return total, (a, n)

    def gradient(self, w: Weights, i: jax.Array) -> tuple[Weights, jax.Array]:
        """∇ℓ of token i, and the first-order decrease of its loss down to the target."""
        call, gates, k, v = self.call, self.of.gates, self.of.k[i], self.of.v[i]
        threshold = gates["threshold"][i][None] if "threshold" in gates else None  # there is no window then
        out = lambda w: call.structure.apply(_matmul(w), k[None], k[None], self.of.norm)
        loss = lambda out: call.objective.loss(out, v[None], threshold)[0]
        fall = jnp.maximum(jnp.sum(jax.grad(loss)(out(w)) * (out(w) - v)), 0.0)
        return jax.grad(lambda w: loss(out(w)))(w), fall

    def bounded(
        self, size: jax.Array | float, state: _State, t: jax.Array, g: Weights, fall: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """η' from η, see `bound`. fall: a_t and n_t."""
        (w, s, start), (a, n), horizon = state, fall, self.call.horizon
        assert self.call.step_bound is not None
        assert horizon is not None
        inner = lambda x, y: jax.tree.reduce(jnp.add, jax.tree.map(lambda x, y: jnp.sum(x * y), x, y))
        change = jax.tree.map(jnp.subtract, w, start)
        most = self.call.step_bound / horizon * a
        if s is not None:
            theta = self.of.gates["momentum_decay"][t]
            change = jax.tree.map(lambda x, s: x + horizon * theta * s, change, s)
        square = inner(g, g)
        # A square or n of almost zero is no divisor; the inner `where` keeps its derivative finite.
        size = jnp.where(square >= SMALLEST, jnp.minimum(size, most / jnp.where(square >= SMALLEST, square, 1.0)), size)
        return size * jnp.where(n >= SMALLEST, 1.0 + inner(g, change) / jnp.where(n >= SMALLEST, n, 1.0), 1.0)

    def within(self, w: jax.Array) -> jax.Array:
        """W, or W scaled to the limit of its norm."""
        if self.call.norm_bound is None:
            return w
        square, most = jnp.sum(w * w), self.call.norm_bound * w.shape[0] ** 0.5
        over = square > most**2
        return jnp.where(over, most / jnp.sqrt(jnp.where(over, square, 1.0)), 1.0) * w
