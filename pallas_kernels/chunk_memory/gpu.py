"""The chunkwise memory on GPUs. Only the sequential part is a kernel, and its state stays in the L2 cache.

The weights and momenta of a two-layer memory do not fit into a multiprocessor, so they are not on chip. One program processes the
chunks of a row in order. It writes the state before each chunk, which the backward pass needs anyway, and the next chunk reads it
back. A step computes the gradients of a chunk's tokens in registers, in tiles of the hidden width, and adds them to the state. The
backward kernel runs in reverse and computes only the cotangent of the state before each chunk:

    forward   W_0, S_0, tokens           → W_i, S_i before each chunk
    backward  W_i, tokens, ext_i, G_N    → G_i = ext_i + (∂ state_{i+1} / ∂ state_i)ᵀ G_{i+1}

Everything else is parallel: reads, and the derivatives of tokens and gates given G_i, are `MemoryChunk` on all chunks at once,
compiled by XLA.

Per-token Muon has a separate implementation (`scan_muon`). Its time goes into Newton–Schulz, which is a separate kernel.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import BEGINS, EMPTY, Arrays, Interpret
from pallas_kernels.blocks import entry, product
from pallas_kernels.chunk_memory.bound import system, within_norm
from pallas_kernels.chunk_memory.chunk import MemoryChunk, Structure
from pallas_kernels.chunk_memory.gates import Coefficients, coefficients, decays, window_matrix
from pallas_kernels.chunk_memory.gpu_bound import MOST_TOKENS, Solved, library_solve
from pallas_kernels.chunk_memory.gpu_cotangents import state_cotangents
from pallas_kernels.chunk_memory.gpu_states import states
from pallas_kernels.chunk_memory.gpu_step import Layers, Settings, Tokens, block_tokens, places
from pallas_kernels.chunk_memory.muon import MuonChunk
from pallas_kernels.chunk_scan import Restarts
from pallas_kernels.gpu import LEAST, padded
from pallas_kernels.newton_schulz import MOST_COLUMNS, MOST_ROWS, newton_schulz
from pallas_kernels.side_by_side import rows_of_columns
from pallas_kernels.varying import vary_like

Y = TypeVar("Y")  # a tree of arrays
Limits = tuple[float, ...] | None
# carry before each chunk and after the last, scales, systems, xs, window, marks
_Kept = tuple[Arrays, jax.Array | None, Solved | None, Arrays, Arrays, jax.Array | None]

_MOST_CHANNELS = 256  # of keys (with their features) and values; a step holds all channels of its tokens
_TOGETHER = 2**28  # bytes of one hidden array [rows, chunks, tokens, hidden] of the parallel parts


def unsupported_by_gpu(
    structure: Structure,
    weights: dict[str, jax.Array],
    chunk_size: int,
    dtype: jax.typing.DTypeLike,
    *,
    muon: bool,
    step_bound: float | None = None,
) -> str | None:
    """The reason why the kernels cannot run a memory with weights [..., out, in] and tokens of a dtype, or None if they can.

    muon: whether it is written by Muon; then the only kernel is Newton–Schulz. step_bound: as in `chunk_memory`.
    """
    if muon:
        return _unsupported_muon(weights)
    layers = Layers.of(structure)
    if layers is None:
        return f"structure={structure!r} has more than one hidden layer"
    if chunk_size < LEAST:
        return f"chunk_size={chunk_size}, must be at least {LEAST}"
    channels = [w.shape[-2 if name == layers.outer else -1] for name, w in weights.items()]
    # With a hidden layer, a float32 step would need more shared memory than there is.
    most = _MOST_CHANNELS // (2 if layers.inner and jnp.dtype(dtype) == jnp.float32 else 1)
    if max(channels) > most:
        return f"keys or values of {jnp.dtype(dtype).name} have {max(channels)} channels, more than {most}"
    width = weights[layers.outer].shape[-1]
    if layers.inner and width % LEAST:
        return f"the hidden width {width} is not a multiple of {LEAST}"
    if step_bound is not None and chunk_size > MOST_TOKENS:
        return f"chunk_size={chunk_size} with bounded steps, must be at most {MOST_TOKENS}"
    return None


def _unsupported_muon(weights: dict[str, jax.Array]) -> str | None:
    """The reason why the Newton–Schulz kernel cannot process the momenta of weights [..., out, in], or None if it can."""
    shapes = {name: w.shape[-2:] for name, w in weights.items()}
    large = {name: shape for name, shape in shapes.items() if min(shape) > MOST_ROWS or max(shape) > MOST_COLUMNS}
    return (
        f"Newton–Schulz supports matrices up to {MOST_ROWS} × {MOST_COLUMNS:,}, weights are {large}" if large else None
    )


def scan_muon(
    chunk: MuonChunk, interpret: Interpret, carry: Arrays, xs: Arrays, restarts: Restarts
) -> tuple[Arrays, tuple[jax.Array]]:
    """`chunk_scan` over blocks [rows, blocks, …]. Newton–Schulz of all rows is one kernel, the rest is compiled by XLA."""
    orthogonalize = functools.partial(
        newton_schulz,
        steps=len(chunk.triples),
        schedule=chunk.triples,
        form=None,
        implementation="pallas_gpu",
        interpret=interpret,
    )
    by_rows = jax.vmap(dataclasses.replace(chunk, newton_schulz=orthogonalize, transposed=jnp.transpose))

    @jax.checkpoint
    def step(carry: Arrays, of_block: tuple[Arrays, jax.Array | None]) -> tuple[Arrays, Arrays]:
        xs, mark = of_block
        before = carry
        if mark is not None:
            assert restarts is not None
            before = begun(mark, carry, restarts[1])
        after, y = by_rows(before, _wide(xs))
        if mark is not None:
            after = tuple(jnp.where(_of_rows(mark == EMPTY, x), x, y) for x, y in zip(carry, after))
        return after, y

    first = lambda x: jnp.moveaxis(x, 1, 0)
    marks = None if restarts is None else first(restarts[0])
    carry, (y,) = jax.lax.scan(step, carry, (tuple(map(first, xs)), marks))
    return carry, (jnp.moveaxis(y, 0, 1),)


def begun(mark: jax.Array, carry: Arrays, start: Arrays) -> Arrays:
    """The carry [rows, …] before a chunk with `mark` [rows]: where it begins a segment, `start`, and zeros for its other arrays."""
    start = (*start, *(jnp.zeros_like(x) for x in carry[len(start) :]))
    return tuple(jnp.where(_of_rows(mark == BEGINS, x), first, x) for first, x in zip(start, carry))


def _of_rows(condition: jax.Array, x: jax.Array) -> jax.Array:
    """[rows] → [rows, 1, …], like x."""
    return condition.reshape(-1, *[1] * (x.ndim - 1))


def chunk_memory(
    chunk: MemoryChunk, carry: Arrays, xs: Arrays, past: Arrays, restarts: Restarts, interpret: Interpret
) -> tuple[Arrays, jax.Array]:
    """`memory_scan` with the window's tokens before each chunk, and with token dimensions padded for the kernels.

    carry: weights by name, then momenta in the same form, [rows, out, in]. xs: q, k, v [rows, chunks, m, dim] and gates
    [rows, chunks, n, m]. past: for c > 1, keys, values and `real` of the tokens before the first one, [rows, ≥ c − 1, dim or 1].
    """
    layers = Layers.of(chunk.structure)
    assert layers is not None
    chunk = dataclasses.replace(chunk, solve=library_solve)
    wanted = [x.shape for x in carry]

    def widths(name: str, w: jax.Array) -> tuple[int, int]:
        out, inputs = w.shape[-2:]
        outer = name == layers.outer
        return (padded(out) if outer else out), (inputs if outer and layers.inner else padded(inputs))

    names = chunk.names * (len(carry) // len(chunk.names))
    limits, start = None, () if restarts is None else restarts[1]
    if restarts is not None:
        # The kernel begins segments after the first chunk.
        carry = begun(restarts[0][:, 0], carry, start)
    if (most := chunk.norm_bound) is not None:
        # The kernel limits the states that it writes; the first one comes from outside.
        within = jax.vmap(lambda w: within_norm(most * w.shape[0] ** 0.5, w) * w)
        carry = tuple(within(w) for w in carry)
        limits = tuple(most * w.shape[-2] ** 0.5 for w in carry[: len(chunk.names)])
        chunk = dataclasses.replace(chunk, norm_bound=None)
    # Padding stays zero, because a gradient is zero where a channel of both factors is.
    carry = tuple(_pad(w, *widths(name, w)) for name, w in zip(names, carry))
    *tokens, gates = xs
    value_dim = tokens[2].shape[-1]
    q, k, v = (_pad(x, x.shape[-2], padded(x.shape[-1])) for x in tokens)
    window: Arrays = ()
    if chunk.window > 1:
        size = padded(chunk.window - 1)
        line = lambda x, past: _before(x, _pad(past, past.shape[-2], x.shape[-1]), size)
        window = tuple(line(x, past) for x, past in zip((k, v, gates[..., 1:2, :].mT), past, strict=True))
    start = tuple(_pad(w, *widths(name, w)) for name, w in zip(names, start))
    restarts = None if restarts is None else (restarts[0], start)
    arrays = vary_like((carry, (q, k, v, gates), window, restarts))
    final, y = memory_scan(chunk, limits, interpret, *arrays)
    return tuple(x[:, : shape[1], : shape[2]] for x, shape in zip(final, wanted)), y[..., :value_dim]


def _pad(x: jax.Array, rows: int, columns: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, columns - x.shape[-1])])


def _before(x: jax.Array, past: jax.Array, size: int) -> jax.Array:
    """The `size` tokens before each chunk: [rows, chunks, m, n] → float32 [rows, chunks, size, n].

    past: those before the first one, [rows, …, n]; zeros before them.
    """
    rows, count, m, n = x.shape
    past = past[:, -size:].astype(jnp.float32)
    line = jnp.concatenate([past, x.reshape(rows, count * m, n).astype(jnp.float32)], axis=1)
    line = jnp.pad(line, ((0, 0), (size - past.shape[1], 0), (0, 0)))
    return line[:, m * jnp.arange(count)[:, None] + jnp.arange(size)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def memory_scan(
    chunk: MemoryChunk,
    limits: Limits,
    interpret: Interpret,
    carry: Arrays,
    xs: Arrays,
    window: Arrays,
    restarts: Restarts,
) -> tuple[Arrays, jax.Array]:
    """Scans a memory over the chunks of many rows.

    Args:
      chunk: a chunk whose structure has `Layers`, without a bound on norms; static.
      limits: limits on ‖W‖_F of each weight and its momentum, by name, at the starts of chunks. The carry is within them. None
        means no limits.
      interpret: passed to `pallas_call`.
      carry: weights by name, then momenta in the same form, float32 [rows, out, in]. Dimensions of tokens are powers of two ≥ 16.
      xs: q, k, v [rows, chunks, m, dim] and gates [rows, chunks, n, m] for `MemoryChunk`, m a power of two ≥ 16.
      window: for c > 1, keys, values and `real` of the tokens before each chunk, [rows, chunks, w, dim or 1], w a power of two ≥
        16.
      restarts: CONTINUES, BEGINS or EMPTY for each chunk, int32 [rows, chunks], and the weights with which segments begin, in the
        form of the carry; momenta begin with zero. The first chunk does not begin one. None means one segment.

    Returns:
      The carry after the last chunk, and y [rows, chunks, m, value_dim], float32. There is no forward-mode derivative.
    """
    return _forward(chunk, limits, interpret, carry, xs, window, restarts)[0]


def _forward(
    chunk: MemoryChunk,
    limits: Limits,
    interpret: Interpret,
    carry: Arrays,
    xs: Arrays,
    window: Arrays,
    restarts: Restarts,
) -> tuple[tuple[Arrays, jax.Array], _Kept]:
    tokens = _tokens(chunk, xs, window)
    before, scales, solved = states(Settings(chunk, limits, interpret, xs[0].dtype), carry, tokens, restarts)
    read = lambda state, xs, window: chunk((*state, *window), _wide(xs))[1][0]
    y = _all_chunks(read, before, xs, window)
    last, marks = tuple(x[:, -1] for x in before), None if restarts is None else restarts[0]
    return (last, y), (before, scales, solved, xs, window, marks)


def _backward(
    chunk: MemoryChunk, limits: Limits, interpret: Interpret, kept: _Kept, cotangents: tuple[Arrays, jax.Array]
) -> tuple[Arrays, Arrays, Arrays, tuple[None, Arrays] | None]:
    before, scales, solved, xs, window, marks = kept
    dfinal, dy = cotangents
    count = len(before)

    def pullback(
        state: Arrays, xs: Arrays, window: Arrays, dstate: Arrays | None, dy: jax.Array | None
    ) -> tuple[Arrays, Arrays, Arrays]:
        """For one chunk: cotangents of its state, tokens and window from those of the next state, or of y."""

        def outputs(state: Arrays, xs: Arrays, window: Arrays) -> tuple[Arrays, jax.Array]:
            after, (y,) = chunk((*state, *window), _wide(xs))
            return after[:count], y

        (after, y), pull = jax.vjp(outputs, state, xs, window)
        zero = functools.partial(jax.tree.map, jnp.zeros_like)
        return pull((zero(after) if dstate is None else dstate, zero(y) if dy is None else dy))

    from_reads = lambda state, xs, window, dy: pullback(state, xs, window, None, dy)
    from_writes = lambda state, xs, window, dstate: pullback(state, xs, window, dstate, None)[1:]
    dstate, *dtokens = _all_chunks(from_reads, before, xs, window, dy)
    tokens = _tokens(chunk, xs, window)
    settings = Settings(chunk, limits, interpret, xs[0].dtype)
    after, dstart = state_cotangents(settings, before, scales, solved, tokens, dstate, dfinal, marks)
    more = _all_chunks(from_writes, before, xs, window, after)
    dxs, dwindow = jax.tree.map(jnp.add, tuple(dtokens), tuple(more))
    return tuple(x[:, -1] for x in after), dxs, dwindow, None if marks is None else (None, dstart)


memory_scan.defvjp(_forward, _backward)


def _all_chunks(f: Callable[..., Y], *arrays: Arrays | jax.Array) -> Y:
    """Applies f to every chunk of every row, with the number of rows at a time limited by memory. Arrays: [rows, chunks, …].

    Those with one place more are cut here, where a copy has only these rows.
    """
    state, xs = arrays[:2]
    count = xs[0].shape[1]
    numbers = count * xs[0].shape[2] * max(max(x.shape[-2:]) for x in state)
    together = max(1, _TOGETHER // (4 * numbers))
    over_chunks = lambda *arrays: jax.vmap(f)(*jax.tree.map(lambda x: x[:count], arrays))
    if together >= xs[0].shape[0]:
        return jax.vmap(over_chunks)(*arrays)
    return jax.lax.map(lambda arrays: over_chunks(*arrays), arrays, batch_size=together)


def _wide(xs: Arrays) -> Arrays:
    return tuple(x.astype(jnp.float32) for x in xs)


def _tokens(chunk: MemoryChunk, xs: Arrays, window: Arrays) -> Tokens:
    """Inputs of a state's step for each chunk."""
    _, k, v, gates = xs
    real = window[2] if window else None
    size = block_tokens(max(k.shape[-1], v.shape[-1]), k.dtype)
    parts = lambda x, axis: jnp.split(x, list(range(size, x.shape[axis], size)), axis)
    blocks = list(zip(parts(k, 2), parts(v, 2)))
    if window:
        blocks += zip(parts(window[0], 2), parts(window[1], 2))
    of_blocks = lambda x: [x[..., place.start : place.start + place.size] for place in places(blocks)]
    over_chunks = lambda f: jax.vmap(jax.vmap(functools.partial(f, chunk)))
    weights, scales = over_chunks(_at_end)(gates, real)
    threshold = chunk.named(gates).threshold
    of_losses = [] if threshold is None else of_blocks(threshold[..., 0, :])
    found: Tokens = {
        "blocks": blocks, "weights": of_blocks(weights), "scales": scales, "thresholds": of_losses, "step_gates": None,
    }  # fmt: skip
    if chunk.step_bound is None:
        return found
    columns, across, gamma = over_chunks(_of_steps)(gates, real)
    return {**found, "weights": [], "step_gates": {"columns": columns, "across": across, "gamma": gamma}}


def _at_end(chunk: MemoryChunk, gates: jax.Array, real: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """For one chunk: the weights of its gradients in W and S at its end [1 or 2, E], and a, s, β there [3]."""
    rows = chunk.named(gates)
    at_end = coefficients(decays(rows), rows.step)
    weights = _of_gradients(at_end)
    if real is not None:
        weights = [product(x, _gamma(chunk, gates, real), 1, 0) for x in weights]
    one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
    last = lambda x, absent: absent if x is None else x[-1, 0]
    return jnp.concatenate(weights), jnp.stack(
        [last(at_end.start, one), last(at_end.started, zero), last(at_end.momentum_start, zero)]
    )


def _of_steps(
    chunk: MemoryChunk, gates: jax.Array, real: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The arrays of `StepGates` for one chunk."""
    assert chunk.step_bound is not None
    rows = chunk.named(gates)
    of_gates = decays(rows)
    *columns, across = system(chunk.step_bound, chunk.horizon, rows, of_gates)
    last = _of_gradients(coefficients(of_gates, -jnp.ones_like(rows.step)))
    found = [x[:, 0] for x in columns if x is not None] + [x[0] for x in last]
    return jnp.stack(found), across, None if real is None else _gamma(chunk, gates, real)


def _of_gradients(of_chunk: Coefficients) -> list[jax.Array]:
    """The weights of windowed gradients in W, and in S if there is momentum, at the chunk's end: rows [1, m]."""
    last = of_chunk.memory.shape[0] - 1
    return [x for x in (entry(of_chunk.memory, last), of_chunk.momentum) if x is not None]


def _gamma(chunk: MemoryChunk, gates: jax.Array, real: jax.Array) -> jax.Array:
    """Γ [m, E] over the tokens of a chunk and of the window before it. real: of the window's tokens, [w, 1]."""
    before = real.shape[0]
    gamma = window_matrix(gates[-chunk.window :].T, before)
    gamma = gamma * rows_of_columns(jnp.concatenate([real, chunk.named(gates).real.T]))
    return jnp.concatenate([gamma[:, before:], gamma[:, :before]], axis=1)
