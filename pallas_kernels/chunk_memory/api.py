"""The chunkwise recurrence over whole sequences: checks, layout, and choice of the implementation."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import CONTINUES, EMPTY, Arrays, Interpret, Segments, Window, rows_of
from pallas_kernels.blocks import token_precision
from pallas_kernels.chunk_memory import gpu, reference
from pallas_kernels.chunk_memory.bound import windowed_floor
from pallas_kernels.chunk_memory.call import Call, check, check_for_kernels
from pallas_kernels.chunk_memory.chunk import MemoryChunk, Objective, Structure, tall, window_rows
from pallas_kernels.chunk_memory.muon import MuonChunk, writes
from pallas_kernels.chunk_program import Unroll
from pallas_kernels.chunk_scan import Restarts, chunk_scan
from pallas_kernels.layout import from_chunks, gates_to_chunks, to_chunks
from pallas_kernels.newton_schulz.reference import Triple
from pallas_kernels.varying import vary_like

# Heads of a program → bytes of one head's carry, and the same weighed by what a chunk needs beside it, at most.
_MOST_TOGETHER = {8: (2**18, 2**18), 4: (3 * 2**17, 5 * 2**18), 2: (3 * 2**19, 13 * 2**19)}
# Heads of a program → its chunks. The widest memories leave no vector memory for a second one.
_UNROLL = {8: Unroll(4, 2), 4: Unroll(2, 2), 2: Unroll(2, 2), 1: Unroll()}
# With a bound, for lack of registers, a second one would save nothing in the backward kernel of narrow memories.
_UNROLL_BOUNDED = {**_UNROLL, 8: Unroll(4, 1)}
Weights = dict[str, Float[Array, "batch heads _out _in"]]
Scan = Callable[[Arrays, Arrays, Restarts], tuple[Arrays, Arrays]]


def chunk_memory(
    structure: Structure,
    objective: Objective,
    weights: Weights,
    momenta: Weights | None,
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    *,
    step_size: Float[Array, "batch time heads"],
    retention: Float[Array, "batch time heads"] | None = None,
    momentum_decay: Float[Array, "batch time heads"] | None = None,
    write_size: Float[Array, "batch time heads"] | None = None,
    window_weights: Float[Array, "batch time heads window"] | None = None,
    chunk_size: int = 64,
    newton_schulz: tuple[Triple, ...] | None = None,
    every: int = 1,
    step_bound: float | None = None,
    horizon: float | None = None,
    floor: Float[Array, "batch time heads"] | None = None,
    threshold: Float[Array, "batch time heads"] | None = None,
    norm_bound: float | None = None,
    window: Window | None = None,
    segments: Segments | None = None,
    norm: dict[str, Float[Array, "heads value_dim"]] | None = None,
    implementation: str = "pallas_tpu",
    interpret: Interpret = False,
) -> tuple[Float[Array, "batch time heads value_dim"], Weights, Weights | None]:
    """M_t = α_t M_{t−1} + β_t S_t, S_t = θ_t S_{t−1} − η_t Σ_j γ_{t,j} ∇ℓ(M_{t'}; k_{t−j}, v_{t−j}), y_t = M_t(q_t).

    This is A Eq. 12–13 with the window of Eq. 9 and the chunks of §3.3. M_{t'} is the memory at the start of the token's chunk. The
    sequence starts a chunk. With `newton_schulz` (Muon, A Eq. 32–33) the step size multiplies the
    write: S_t = θ_t S_{t−1} − Σ …, M_t = α_t M_{t−1} + η_t NS(S_t).

    Args:
      structure, objective: frozen objects with the methods `Structure.apply` and `Objective.loss`, such as those of
        `atlasjax.memory.axes.structures` and `objectives`, static under jit. A residual structure adds k itself.
      weights: M before the first token, name → [batch, heads, out, in].
      momenta: S in the same form. Required if `momentum_decay` is given.
      q, k: [batch, time, heads, key_dim], float32 or bfloat16.
      v: [batch, time, heads, value_dim], in the same dtype.
      step_size: η, [batch, time, heads].
      retention: α, [batch, time, heads]. None means 1.
      momentum_decay: θ, [batch, time, heads]. None means no momentum: S_t is the step itself.
      write_size: β, [batch, time, heads]. None means 1. Needs momentum, and not with `newton_schulz`.
      window_weights: γ, [batch, time, heads, c] with 1 ≤ c ≤ 64. None means c = 1 and γ = 1.
      chunk_size: a power of two from 8 to 256. It affects the result.
      newton_schulz: triples (a, b, c), one per step, for a memory written by Muon, which needs momenta. None means no Muon.
      every: with Muon, the memory is written only at every `every`-th token of its chunk; a power of two that divides chunk_size.
      step_bound: > 0 replaces η by η' of `bound`, which scales each step by the remaining error of its token. With 1 a token steps
        at most onto its target. Not with `newton_schulz`.
      horizon: H ≥ 1, how many times momentum may add a token's write. Required with step_bound and momentum; θ must be at most
        1 − 1/H.
      floor: for each token, added to the decrease of its loss before dividing by it, [batch, time, heads]. None means 0.
      threshold: the third argument of `Objective.loss`, δ of Huber's loss, [batch, time, heads]. Not with `newton_schulz`, nor
        with window_weights.
      norm_bound: > 0 scales each weight and momentum with ‖W‖_F > norm_bound · √rows back to this norm at the start of a chunk.
      window: the tokens before the first one, for c > 1. None means that there are none.
      segments: packed segments on a grid of chunks of chunk_size tokens, which divides time. Padding needs η = 0 and α = θ = 1, and
        window weights that reach beyond the start of a segment must be zero. None means one segment.
      norm: {"scale", "bias"} of a LayerNorm inside the memory, [heads, value_dim], for `structure.apply`. None means that there is
        none. Not with `newton_schulz`, nor with "pallas_gpu".
      implementation: "pallas_tpu" is a kernel that keeps M and S on chip for the whole sequence. Its backward pass recomputes from
        the memories before each chunk, and it has no forward-mode derivative. "reference" computes token by token.
      interpret: passed to `pallas_call`.

    Returns:
      y [batch, time, heads, value_dim], in q's dtype, and the last M and S (None without momentum), float32.

    Raises:
      ValueError: wrong shapes or dtypes, an unknown implementation or chunk size, or a memory that the implementation does not
        support.
    """
    call = Call(
        structure, objective, weights, momenta, q, k, v, step_size, retention, momentum_decay, write_size, window_weights,
        chunk_size, newton_schulz, every, step_bound, horizon, floor, threshold, norm_bound, window, segments, norm,
    )  # fmt: skip
    check(call, implementation)
    call = call._replace(horizon=1.0 if horizon is None else horizon)
    if implementation == "reference":
        return reference.chunk_memory(call)
    check_for_kernels(call)
    if implementation == "pallas_gpu":
        muon = newton_schulz is not None
        reason = gpu.unsupported_by_gpu(structure, weights, chunk_size, q.dtype, muon=muon, step_bound=step_bound)
        if reason is not None:
            raise ValueError(f'chunk_memory: implementation="pallas_gpu" cannot run this call: {reason}.')
    if window_weights is not None and window_weights.shape[-1] == 1:
        # A window of one token has weights all the same, which a chunk without a window does not read.
        call = call._replace(window_weights=jnp.pad(window_weights, ((0, 0), (0, 0), (0, 0), (0, 1))))
    return _by_kernels(call, implementation, interpret)


class _Order(NamedTuple):
    """How the weights of a memory lie in a carry: their names in order, and those that are transposed."""

    names: tuple[str, ...]
    transposed: tuple[str, ...]

    def stored(self, weights: Weights) -> Arrays:
        """The weights in float32. A transposition is its own inverse."""
        turned = lambda name, x: x.swapaxes(-1, -2) if name in self.transposed else x
        return tuple(turned(name, weights[name].astype(jnp.float32)) for name in self.names)

    def named(self, arrays: Arrays) -> Weights:
        """The inverse of `stored`, from the first of `arrays`."""
        return dict(zip(self.names, self.stored(dict(zip(self.names, arrays)))))


class _Carry(NamedTuple):
    """A carry in the parts of `MemoryChunk`: weights, the scale and bias of a LayerNorm, momenta, and the window's tokens."""

    weights: Arrays
    norm: Arrays
    momenta: Arrays
    window: Arrays

    @property
    def state(self) -> Arrays:
        return *self.weights, *self.norm, *self.momenta


def _by_kernels(call: Call, implementation: str, interpret: Interpret) -> tuple[jax.Array, Weights, Weights | None]:
    on_tpu = call.newton_schulz is None and implementation == "pallas_tpu"
    # Not with a LayerNorm inside: the compilers for v5e and v5p (libtpu 0.0.42) then fail with an internal error.
    order = _Order(tuple(sorted(call.weights)), tall(call.weights) if on_tpu and call.norm is None else ())
    chunk, carry, rows = _chunk(call, order), _carry(call, order), _rows(call)
    start: Arrays = ()
    if call.segments is not None and call.segments.start is not None:
        of_heads = {name: call.segments.start_of_heads(w) for name, w in call.segments.start.items()}
        start = *order.stored(of_heads), *carry.norm
    if on_tpu:
        final, y = _on_tpu(call, chunk, (*carry.state, *carry.window), rows, start, interpret)
    else:
        final, y = _by_rows(call, chunk, carry, rows, start, implementation, interpret)
    momenta = final[len(order.names) + len(carry.norm) :]
    return y.astype(call.q.dtype), order.named(final), None if call.momenta is None else order.named(momenta)


def _chunk(call: Call, order: _Order) -> MemoryChunk:
    assert call.horizon is not None
    return MemoryChunk(
        call.structure, call.objective, order.names, call.momentum_decay is not None, call.retention is not None,
        1 if call.window_weights is None else call.window_weights.shape[-1], token_precision(call.q.dtype),
        step_bound=call.step_bound, horizon=call.horizon, norm_bound=call.norm_bound, norm=call.norm is not None,
        threshold=call.threshold is not None, transposed=order.transposed, write_gate=call.write_size is not None,
    )  # fmt: skip


def _carry(call: Call, order: _Order) -> _Carry:
    """The carry before the first token."""
    batch, _, heads, _ = call.q.shape
    weights, norm = order.stored(call.weights), call.norm
    before: Arrays = ()
    of_norm = [] if norm is None else [norm[name].astype(jnp.float32)[:, None] for name in ("scale", "bias")]
    fixed = tuple(jnp.broadcast_to(x, (batch, *x.shape)) for x in of_norm)
    momenta = () if call.momenta is None else order.stored(call.momenta)
    if call.window_weights is not None:
        window = call.window
        if window is None:
            past = lambda x: jnp.zeros((batch, heads, 0, x.shape[-1]), jnp.float32)
            window = Window(past(call.k), past(call.v), jnp.zeros((batch,), jnp.int32))
        before = window.of_heads(window_rows(call.window_weights.shape[-1]))
    return _Carry(weights, fixed, momenta, before)


def _rows(call: Call) -> list[tuple[jax.Array, float]]:
    """The gates in the order of `MemoryChunk`, each with its value at padding: there η and β are 0, and α and θ keep the state."""
    ones, gamma = call.ones, call.window_weights
    real = ones if call.segments is None else jnp.broadcast_to(call.segments.real[:, :, None], ones.shape)
    rows = [(call.step_size, 0.0), (real, 0.0)]
    rows += [(x, 1.0) for x in (call.retention, call.momentum_decay) if x is not None]
    rows += [] if call.write_size is None else [(call.write_size * real, 0.0)]
    if call.step_bound is not None:
        past = None if call.window is None else call.window.real_floor
        rows.append((0.0 * ones if call.floor is None else windowed_floor(call.floor, gamma, past), 0.0))
    rows += [] if call.threshold is None else [(call.threshold, 1.0)]
    return rows + ([] if gamma is None else [(gamma, 0.0)])


def _on_tpu(
    call: Call, chunk: MemoryChunk, carry: Arrays, rows: list[tuple[jax.Array, float]], start: Arrays,
    interpret: Interpret,
) -> tuple[Arrays, jax.Array]:  # fmt: skip
    together = _together(carry, call.chunk_size, call.q.dtype)
    unroll = (_UNROLL if call.step_bound is None else _UNROLL_BOUNDED)[together]
    final, (y,) = chunk_scan(
        chunk, carry, (call.q, call.k, call.v), gates_to_chunks(rows, call.chunk_size), together=together, unroll=unroll,
        interpret=interpret, dtype=call.q.dtype,
        restarts=None if call.segments is None else (call.segments.marks, start),
    )  # fmt: skip
    return final, y


def _by_rows(
    call: Call, chunk: MemoryChunk, carry: _Carry, rows: list[tuple[jax.Array, float]], start: Arrays,
    implementation: str, interpret: Interpret,
) -> tuple[Arrays, jax.Array]:  # fmt: skip
    """On GPUs, and Muon: each head of each batch element is a row."""
    (batch, time, heads, _), size = call.q.shape, call.chunk_size
    first, block = (*carry.state, *carry.window), size
    if call.newton_schulz is not None:
        numbers = sum(w.shape[-2] * w.shape[-1] for w in call.weights.values())
        block = min(size, call.every * writes(numbers, call.q.dtype))
        begins = jnp.broadcast_to((jnp.arange(time) % size < block)[:, None], call.ones.shape)
        rows = [*rows, (begins, 0.0)]
        first, start = (*carry.weights, *first), start * 2  # M_{t'}, then M
    xs = (*(to_chunks(x, size) for x in (call.q, call.k, call.v)), rows_of(gates_to_chunks(rows, size)))
    first = tuple(map(rows_of, first))
    restarts = None if call.segments is None else (call.segments.rows(heads), tuple(map(rows_of, start)))
    if call.newton_schulz is None:
        state = len(carry.state)
        final, y = gpu.chunk_memory(chunk, first[:state], xs, first[state:], restarts, interpret)
    else:
        muon = MuonChunk(chunk, call.newton_schulz, call.every)
        run = gpu.scan_muon if implementation == "pallas_gpu" else _scan_muon
        final, y = _scan_blocks(functools.partial(run, muon, interpret), first, xs, restarts, block)
        final = final[len(carry.weights) :]
    return tuple(x.reshape(batch, heads, *x.shape[1:]) for x in final), from_chunks(y, batch, time)


def _together(carry: Arrays, chunk_size: int, dtype: jax.typing.DTypeLike) -> int:
    """Heads of one program on a TPU: they hide each other's latency, where vector memory has space for them."""
    of_head = sum(4 * x.shape[-2] * x.shape[-1] for x in carry)
    # A longer chunk keeps more between its passes, and exact products do.
    weighed = of_head * (chunk_size / 64) ** 2 * (2 if jnp.dtype(dtype) == jnp.float32 else 1)
    fits = lambda most: of_head <= most[0] and weighed <= most[1]
    return next((heads for heads, most in _MOST_TOGETHER.items() if fits(most)), 1)


def _scan_muon(
    chunk: MuonChunk, interpret: Interpret, carry: Arrays, xs: Arrays, restarts: Restarts
) -> tuple[Arrays, tuple[jax.Array]]:
    """`chunk_scan` over blocks [rows, blocks, block, dim], with one head for each row."""
    heads = lambda arrays: tuple(x[:, None] for x in arrays)
    *tokens, gates = xs
    rows, blocks, block = tokens[0].shape[:3]
    final, (y,) = chunk_scan(
        chunk, heads(carry), tuple(x.reshape(rows, blocks * block, 1, -1) for x in tokens), gates[:, None],
        interpret=interpret, restarts=None if restarts is None else (restarts[0], heads(restarts[1])),
    )  # fmt: skip
    return tuple(x[:, 0] for x in final), (y.reshape(rows, blocks, block, -1),)


def _scan_blocks(scan: Scan, carry: Arrays, xs: Arrays, restarts: Restarts, block: int) -> tuple[Arrays, jax.Array]:
    """Runs `scan` (`chunk_scan` without its chunk argument) over blocks. The backward pass stores the carry before each chunk, and
    the carries of the blocks of one chunk at a time.

    xs: q, k, v [rows, chunks, chunk_size, dim] and gates [rows, chunks, n, chunk_size]. restarts: of the chunks.
    """
    carry, xs, restarts = vary_like((carry, xs, restarts))
    *tokens, gates = xs
    rows, count, size = tokens[0].shape[:3]
    split = lambda x: jnp.moveaxis(x.reshape(rows, count, size // block, block, -1), 1, 0)
    lanes = jnp.moveaxis(gates.reshape(rows, count, -1, size // block, block), (1, 3), (0, 2))
    marks = None
    if restarts is not None:
        later = jnp.where(restarts[0] == EMPTY, EMPTY, CONTINUES)
        marks = jnp.stack([restarts[0], *[later] * (size // block - 1)], axis=-1).swapaxes(0, 1)

    @jax.checkpoint
    def body(carry: Arrays, of_chunk: tuple[Arrays, jax.Array | None]) -> tuple[Arrays, jax.Array]:
        xs, marks = of_chunk
        carry, (y,) = scan(carry, xs, None if restarts is None or marks is None else (marks, restarts[1]))
        return carry, y

    carry, y = jax.lax.scan(body, carry, ((*map(split, tokens), lanes), marks))
    return carry, jnp.moveaxis(y, 0, 1).reshape(rows, count, size, -1)
