"""The chunkwise recurrence over whole sequences: checks, layout, and choice of the implementation."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import CONTINUES, EMPTY, Arrays, Interpret, Segments, Window, rows_of
from pallas_kernels.blocks import token_precision
from pallas_kernels.chunk_memory import gpu, reference
from pallas_kernels.chunk_memory.bound import windowed_floor
from pallas_kernels.chunk_memory.chunk import MemoryChunk, Objective, Structure, tall, window_rows
from pallas_kernels.chunk_memory.muon import MuonChunk, writes
from pallas_kernels.chunk_program import Unroll
from pallas_kernels.chunk_scan import Restarts, chunk_scan
from pallas_kernels.layout import from_chunks, gates_to_chunks, to_chunks
from pallas_kernels.newton_schulz.reference import Triple
from pallas_kernels.varying import vary_like

IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "reference")
CHUNK_SIZES = (8, 16, 32, 64, 128, 256)
# Heads of a program → bytes of one head's carry, and the same weighed by what a chunk needs beside it, at most.
_MOST_TOGETHER = {8: (2**18, 2**18), 4: (3 * 2**17, 5 * 2**18), 2: (3 * 2**19, 13 * 2**19)}
# Heads of a program → its chunks. The widest memories leave no vector memory for a second one.
_UNROLL = {8: Unroll(4, 2), 4: Unroll(2, 2), 2: Unroll(2, 2), 1: Unroll()}
# With a bound, for lack of registers, a second one would save nothing in the backward kernel of narrow memories.
_UNROLL_BOUNDED = {**_UNROLL, 8: Unroll(4, 1)}
_DTYPES = (jnp.float32, jnp.bfloat16)
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
    """M_t = α_t M_{t−1} + S_t, S_t = θ_t S_{t−1} − η_t Σ_j γ_{t,j} ∇ℓ(M_{t'}; k_{t−j}, v_{t−j}), y_t = M_t(q_t).

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
    _check(weights, momenta, q, k, v, step_size, retention, momentum_decay, window_weights, floor, threshold, window)
    if threshold is not None and (newton_schulz is not None or window_weights is not None):
        raise ValueError("chunk_memory: threshold cannot be used with newton_schulz, nor with window_weights.")
    if segments is not None:
        segments.check("chunk_memory", q.shape[0], q.shape[1], chunk_size)
    if newton_schulz is not None and momenta is None:
        raise ValueError("chunk_memory: newton_schulz needs momenta S and momentum_decay θ, but they are None.")
    if newton_schulz is not None and step_bound is not None:
        raise ValueError("chunk_memory: step_bound is for gradient steps and cannot be used with newton_schulz.")
    if step_bound is not None and momentum_decay is not None and (horizon is None or horizon < 1):
        raise ValueError(f"chunk_memory: horizon={horizon}, should be a number ≥ 1 with step_bound and momentum_decay.")
    horizon = 1.0 if horizon is None else horizon
    if norm is not None and (newton_schulz is not None or implementation == "pallas_gpu"):
        raise ValueError('chunk_memory: norm cannot be used with newton_schulz, nor with implementation="pallas_gpu".')
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"chunk_memory: implementation={implementation!r}, should be one of {IMPLEMENTATIONS}.")
    batch, time, heads, _ = q.shape
    ones = jnp.ones((batch, time, heads), jnp.float32)
    if implementation == "reference":
        gates = {
            "step_size": step_size,
            "retention": ones if retention is None else retention,
            "momentum_decay": ones if momentum_decay is None else momentum_decay,
            "window_weights": ones[..., None] if window_weights is None else window_weights,
            "floor": 0.0 * ones if floor is None else floor,
        } | ({} if threshold is None else {"threshold": threshold})
        return reference.chunk_memory(
            structure, objective, weights, momenta, q, k, v, gates, chunk_size, newton_schulz, every,
            step_bound, horizon, norm_bound, window, segments, norm,
        )  # fmt: skip
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_memory: chunk_size={chunk_size}, should be a power of two from 8 to 256.")
    if every < 1 or every & (every - 1) or every > chunk_size:
        raise ValueError(f"chunk_memory: every={every}, should be a power of two, at most chunk_size={chunk_size}.")
    if implementation == "pallas_gpu":
        reason = gpu.unsupported_by_gpu(
            structure, weights, chunk_size, q.dtype, muon=newton_schulz is not None, step_bound=step_bound
        )
        if reason is not None:
            raise ValueError(f'chunk_memory: implementation="pallas_gpu" cannot run this call: {reason}.')
    if window_weights is not None and window_weights.shape[-1] == 1:
        window_weights = jnp.pad(window_weights, ((0, 0), (0, 0), (0, 0), (0, 1)))
    size = 1 if window_weights is None else window_weights.shape[-1]
    names = tuple(sorted(weights))
    float32 = lambda w: w.astype(jnp.float32)
    on_tpu = newton_schulz is None and implementation == "pallas_tpu"
    # Not with a LayerNorm inside: the compilers for v5e and v5p (libtpu 0.0.42) then fail with an internal error.
    transposed = tall(weights) if on_tpu and norm is None else ()
    stored = lambda arrays: tuple(x.swapaxes(-1, -2) if name in transposed else x for name, x in zip(names, arrays))
    carry = [*stored(float32(weights[name]) for name in names)]
    of_norm = [] if norm is None else [float32(norm[name])[:, None] for name in ("scale", "bias")]
    carry += [jnp.broadcast_to(x, (batch, *x.shape)) for x in of_norm]
    fixed = carry[len(names) :]
    carry += [] if momenta is None else stored(float32(momenta[name]) for name in names)
    before: Arrays = ()
    if size > 1:
        if window is None:
            past = lambda x: jnp.zeros((batch, heads, 0, x.shape[-1]), jnp.float32)
            window = Window(past(k), past(v), jnp.zeros((batch,), jnp.int32))
        before = window.of_heads(window_rows(size))
    precision = token_precision(q.dtype)
    chunk = MemoryChunk(
        structure, objective, names, momentum_decay is not None, retention is not None, size, precision,
        step_bound=step_bound, horizon=horizon, norm_bound=norm_bound, norm=norm is not None, threshold=threshold is not None,
        transposed=transposed,
    )  # fmt: skip
    real = ones if segments is None else jnp.broadcast_to(segments.real[:, :, None], ones.shape)
    rows = [(step_size, 0.0), (real, 0.0), *((x, 1.0) for x in (retention, momentum_decay) if x is not None)]
    if step_bound is not None:
        of_window = None if window is None else window.real_floor
        rows.append((0.0 * ones if floor is None else windowed_floor(floor, window_weights, of_window), 0.0))
    rows += [] if threshold is None else [(threshold, 1.0)]
    rows += [] if window_weights is None else [(window_weights, 0.0)]
    start: Arrays = ()
    if segments is not None and segments.start is not None:
        start = (*stored(segments.start_of_heads(segments.start[name]) for name in names), *fixed)
    first: Arrays = (*carry, *before)
    block = chunk_size
    if newton_schulz is not None:
        numbers = sum(w.shape[-2] * w.shape[-1] for w in weights.values())
        block = min(chunk_size, every * writes(numbers, q.dtype))
        begins = jnp.broadcast_to((jnp.arange(time) % chunk_size < block)[:, None], ones.shape)
        rows.append((begins, 0.0))
        first, start = (*carry[: len(names)], *first), start * 2  # M_{t'}, then M
    gate_rows = gates_to_chunks(rows, chunk_size)
    if on_tpu:
        together = _together(first, chunk_size, q.dtype)
        unroll = (_UNROLL if step_bound is None else _UNROLL_BOUNDED)[together]
        final, (y,) = chunk_scan(
            chunk, first, (q, k, v), gate_rows, together=together, unroll=unroll, interpret=interpret, dtype=q.dtype,
            restarts=None if segments is None else (segments.marks, start),
        )  # fmt: skip
    else:
        xs = (*(to_chunks(x, chunk_size) for x in (q, k, v)), rows_of(gate_rows))
        first = tuple(map(rows_of, first))
        restarts = None if segments is None else (segments.rows(heads), tuple(map(rows_of, start)))
        if newton_schulz is None:
            final, y = gpu.chunk_memory(chunk, first[: len(carry)], xs, first[len(carry) :], restarts, interpret)
        else:
            muon = MuonChunk(chunk, newton_schulz, every)
            run = gpu.scan_muon if implementation == "pallas_gpu" else _scan_muon
            final, y = _scan_blocks(functools.partial(run, muon, interpret), first, xs, restarts, block)
            final = final[len(names) :]
        final = tuple(x.reshape(batch, heads, *x.shape[1:]) for x in final)
        y = from_chunks(y, batch, time)
    momenta_from = len(names) + len(fixed)
    last = lambda start: dict(zip(names, stored(final[start : start + len(names)])))
    return y.astype(q.dtype), last(0), None if momenta is None else last(momenta_from)


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


def _check(
    weights: Weights,
    momenta: Weights | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    step_size: jax.Array,
    retention: jax.Array | None,
    momentum_decay: jax.Array | None,
    window_weights: jax.Array | None,
    floor: jax.Array | None,
    threshold: jax.Array | None,
    window: Window | None,
) -> None:
    if q.ndim != 4 or v.ndim != 4 or not q.shape[1]:
        raise ValueError(
            f"chunk_memory: q and v have shapes {q.shape}, {v.shape}, should be [batch, time ≥ 1, heads, dim]."
        )
    tokens = q.shape[:3]
    wanted = {
        "k": (k, q.shape),
        "v": (v, (*tokens, v.shape[-1])),
        "step_size": (step_size, tokens),
        "retention": (retention, tokens),
        "momentum_decay": (momentum_decay, tokens),
        "floor": (floor, tokens),
        "threshold": (threshold, tokens),
        "window_weights": (
            window_weights,
            (*tokens, window_weights.shape[-1] if window_weights is not None and window_weights.ndim == 4 else "c"),
        ),
    }
    for name, (x, shape) in wanted.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"chunk_memory: {name} has shape {x.shape}, should be {shape}, with q {q.shape}.")
    if window_weights is not None and not 1 <= window_weights.shape[-1] <= 64:
        raise ValueError(f"chunk_memory: window_weights has c={window_weights.shape[-1]}, should be 1 to 64.")
    if window is not None:
        batch, _, heads, key_dim = q.shape
        past = (batch, heads, 0 if window_weights is None else window_weights.shape[-1] - 1)
        wanted = {
            "keys": (window.keys, (*past, key_dim)),
            "values": (window.values, (*past, v.shape[-1])),
            "num_real": (window.num_real, (batch,)),
            "floor": (window.floor, past),
        }
        for name, (x, shape) in wanted.items():
            if x is not None and (x.shape != shape or not past[-1]):
                raise ValueError(
                    f"chunk_memory: window.{name} has shape {x.shape}, should be {shape} with c − 1 ≥ 1 tokens of a window of c."
                )
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES):
        raise ValueError(
            f"chunk_memory: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, should all be float32 or all bfloat16."
        )
    if (momenta is None) != (momentum_decay is None):
        raise ValueError("chunk_memory: give both momenta S and momentum_decay θ, or neither; one of them is None.")
    for name, w in weights.items():
        if w.ndim != 4 or w.shape[:2] != (q.shape[0], q.shape[2]):
            expected = f"({q.shape[0]}, {q.shape[2]}, out, in)"
            raise ValueError(f"chunk_memory: weights[{name!r}] has shape {w.shape}, should be {expected}.")
        if momenta is not None and (name not in momenta or momenta[name].shape != w.shape):
            found = momenta[name].shape if name in momenta else "missing"
            raise ValueError(f"chunk_memory: momenta[{name!r}] is {found}, should have shape {w.shape}.")
