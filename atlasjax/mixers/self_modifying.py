"""Self-modifying Titans (HOPE, Nested Learning, NeurIPS 2025): memories that make their own keys, values, step sizes and decays.

Five memories of each head are fast weights: M_k, M_v and M of width d, M_η and M_α with one output. Each is residual,

    M_□(x) = R x + W1 gelu(W2 x)          R = I, or for one output a row of fast weights

and all of them learn the same tokens, each with its own value v̂ of the value as its target:

    k = l2(M_k(x)),  v = M_v(x),  η = 10⁻³ softplus(M_η(x)),  α = σ(M_α(x) + b)         by the memories at the chunk's start
    y = M(q)                                                                            likewise, before the token is written
    ∇ of ‖M_□(k) − v̂‖²,  v̂ = M_□(v) a constant of the inner gradient                    at the chunk's start
    W2 ← W2 (α I − η k kᵀ) − η ∇_{W2},   R likewise,   W1 ← α W1 − η ∇_{W1}             delta gradient descent, token by token

M_v's targets are its own outputs at its own outputs. Once they grow, they grow doubly exponentially. By default (`bounded`) the
ε = 2 (M_□(k) − v̂) of a token is scaled down to entries of at most 16, each memory has a step size of its own,

    η̄ = min(η, 1 / (2 C (‖h‖² + (‖δ‖²/‖ε‖² + 1) ‖k‖²)))      h = gelu(W2 k),  δ = gelu'(W2 k) ⊙ W1ᵀ ε,  C the memory's chunk

which is that of `memory.bounds` shared out to the tokens of a chunk, and at the end of a chunk each weight is scaled to a norm of
at most 2 √rows.

`generator_chunk` is the chunk of the other four memories. Sources: the paper's text, and github.com/kmccleary3301/nested_learning
(`titan/self_modifying.py`) for what it leaves open. That code stops outer gradients at writes; here they flow through writes and
targets, without which M_v would never be trained.

Within a chunk the gradient by W2 is δ kᵀ with δ fixed at the chunk's start, so that W2 follows a delta rule. The corrections
e_t = W2_{t−1} k_t + δ_t of a chunk solve one unit triangular system, whose matrix is the same for all memories.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.blocks import divisible
from atlasjax.memory.bounds import Bound, within_norm, within_slope
from atlasjax.memory.grid import aligned_layout, choose, lay_chunks, pick_chunks, segmented_layout, streamed_layout
from atlasjax.memory.products import wide_dtype

GENERATORS = ("key", "value", "step_size", "retention")  # the memories beside "memory"
_STEP = 1e-3  # of η
# `Bound`'s own limits keep the memories finite, but an outer gradient of HOPE in training was not, within 80 steps.
_BOUND = Bound(slope=16.0, weight_norm=2.0)
# The least log α. Below this, nothing is left of a memory; sums of larger numbers would lose the decays after them.
_LEAST_LOG = -32.0


@dataclasses.dataclass(frozen=True)
class SelfModifyingConfig:
    """The memories of the mixer "self_modifying_titans".

    Attributes:
      chunk_size: tokens whose gradients are taken at the same memory M, and which read it.
      generator_chunk: the same of the four memories that make keys, values, step sizes and decays. One of the two is a multiple of
        the other. None: chunk_size.
      expansion: hidden width of a memory / size of a head.
      bounded: whether steps, errors and weights are bounded, as in the module's docstring. Otherwise the recurrence is the public
        code's, which can diverge.

    Raises:
      ValueError: a field is out of range, or neither chunk is a multiple of the other.
    """

    chunk_size: int = 16
    generator_chunk: int | None = None
    expansion: int = 1
    bounded: bool = True

    def __post_init__(self) -> None:
        names = ("chunk_size", "generator_chunk", "expansion")
        check.integers(self, dict.fromkeys(names, 1), ("generator_chunk",))
        if max(self.chunks) % min(self.chunks):
            raise ValueError(
                f"SelfModifyingConfig: chunk_size={self.chunk_size} and generator_chunk={self.generator_chunk} must be such that "
                "one is a multiple of the other."
            )

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks of M and of the generators."""
        return self.chunk_size, self.generator_chunk or self.chunk_size

    def chunk(self, name: str) -> int:
        """Chunk of the memory of that name."""
        return self.chunks[name != "memory"]


class Residual(NamedTuple):
    """A residual memory, float32.

    Attributes:
      W1: [*batch, heads, out, hidden].
      W2: [*batch, heads, hidden, in].
      skip: [*batch, heads, out, in]. None: x itself.
    """

    W1: Float[Array, "*batch heads out hidden"]
    W2: Float[Array, "*batch heads hidden in"]
    skip: Float[Array, "*batch heads out in"] | None

    @property
    def heads_axis(self) -> int:  # of its arrays with a batch, for `distributed.cache_shardings`
        return 1


Memories = dict[str, Residual]  # "memory" and `GENERATORS`


class SelfModifyingState(NamedTuple):
    """The state of a stream.

    Attributes:
      start: the memories at the start of their chunks, which read.
      now: the memories after the last token.
      position: tokens read, modulo the longer chunk, int32 [batch].
    """

    start: Memories
    now: Memories
    position: Int[Array, " batch"]


def init_state(params: Memories, batch_size: int) -> SelfModifyingState:
    """The state before the first token."""
    copies = lambda: jax.tree.map(lambda w: jnp.tile(w, (batch_size, *(1,) * w.ndim)), params)
    return SelfModifyingState(copies(), copies(), jnp.zeros(batch_size, jnp.int32))


def scan(
    config: SelfModifyingConfig,
    params: Memories,
    state: SelfModifyingState | None,
    x: Float[Array, "batch time heads dim"],
    q: Float[Array, "batch time heads dim"],
    retention_bias: Float[Array, " heads"],
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
) -> tuple[Float[Array, "batch time heads dim"], SelfModifyingState]:
    """Reads and writes the memories.

    Args:
      config: the chunks.
      params: the memories before the first token, without a batch.
      state: from `init_state` or the call before. None: the memories are fresh.
      x: what keys, values and gates are made of.
      q: queries of unit length.
      retention_bias: b.
      segment_ids: integers ≥ 0. The memories are fresh where the id changes. Only without a state.
      max_segments: bound on the segments of a row, with segment_ids.

    Returns:
      y, like x; and the next state. However a sequence is split into calls, y is the same up to rounding.
    """
    batch, time = x.shape[:2]
    chunk = min(config.chunks)
    fresh = init_state(params, batch)
    zeros = jnp.zeros(batch, jnp.int32)
    if segment_ids is not None:
        assert max_segments is not None
        layout = segmented_layout(segment_ids, max_segments, chunk, chunk, 1, zeros, zeros, zeros - 1)
    elif state is None:
        layout = aligned_layout(batch, time, chunk, 1, zeros)
    elif time > 1:
        layout = streamed_layout(time, chunk, chunk, 1, state.position % chunk, zeros)
    before = fresh if state is None else state
    if time == 1 and segment_ids is None:
        after, y = _slot(config, before, x, q, jnp.ones((batch, 1), bool), retention_bias)
        return y, after
    real = jnp.ones((batch, time), bool)
    laid = tuple(lay_chunks(z, layout.num_slots, chunk, layout.place) for z in (x, q, real))
    resets = jnp.zeros((layout.num_slots, batch), bool) if layout.resets is None else layout.resets

    def slot(state: SelfModifyingState, slot: tuple[jax.Array, ...]) -> tuple[SelfModifyingState, jax.Array]:
        x, q, real, reset = slot
        return _slot(config, choose(reset, fresh, state), x, q, real, retention_bias)

    # The backward pass keeps the memories before each chunk and computes the chunk again.
    after, y = jax.lax.scan(jax.checkpoint(slot, prevent_cse=False), before, (*laid, resets))
    return pick_chunks(y, time, layout.place), after


def _slot(
    config: SelfModifyingConfig, state: SelfModifyingState, x: jax.Array, q: jax.Array, real: jax.Array, bias: jax.Array
) -> tuple[SelfModifyingState, jax.Array]:
    """Tokens [batch, n, heads, dim] of one chunk, of which some may be padding, `real` [batch, n] says which are not."""
    start = state.start
    k = _unit(_apply(start["key"], x))
    v = _apply(start["value"], x)
    eta = _STEP * jax.nn.softplus(_apply(start["step_size"], x)[..., 0])
    log_alpha = jax.nn.log_sigmoid(_apply(start["retention"], x)[..., 0] + bias[None, None])
    log_alpha = jnp.maximum(log_alpha, _LEAST_LOG)
    eta, log_alpha = (jnp.where(real[..., None], gate, 0.0) for gate in (eta, log_alpha))
    y = _apply(start["memory"], q)
    now = {
        name: _written(config, config.chunk(name), start[name], state.now[name], k, v, eta, log_alpha) for name in start
    }

    position = state.position + jnp.sum(real, axis=1, dtype=jnp.int32)
    ends = {name: (position > state.position) & (position % config.chunk(name) == 0) for name in start}
    if config.bounded:
        now = {name: choose(ends[name], _within_norm(memory), memory) for name, memory in now.items()}
    start = {name: choose(ends[name], now[name], start[name]) for name in start}
    return SelfModifyingState(start, now, position % max(config.chunks)), y.astype(x.dtype)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _times(weight: jax.Array, x: jax.Array) -> jax.Array:
    """[batch, heads, out, in] and [batch, n, heads, in] → [batch, n, heads, out]."""
    wide = x.astype(wide_dtype(x.dtype, weight.dtype))
    return jnp.einsum("bhoi,bnhi->bnho", weight, wide, precision=jax.lax.Precision.HIGHEST)


def _gelu(z: jax.Array) -> jax.Array:
    return jax.nn.gelu(z, approximate=False)


def _apply(memory: Residual, x: jax.Array) -> jax.Array:
    skip = x if memory.skip is None else _times(memory.skip, x)
    return skip + _times(memory.W1, _gelu(_times(memory.W2, x)))


def _within_norm(memory: Residual) -> Residual:
    assert _BOUND.weight_norm is not None
    return Residual(**within_norm(_BOUND.weight_norm, memory._asdict()))


def _within_step(
    eta: jax.Array, chunk: int, error: jax.Array, hidden: jax.Array, back: jax.Array, k: jax.Array
) -> jax.Array:
    """η̄ = min(η, 1 / (2 C (‖h‖² + (‖back‖²/‖error‖² + 1) ‖k‖²))), [batch, n, heads], without a division by zero."""
    hidden_square, square, back_square, key_square = (jnp.sum(a * a, axis=-1) for a in (hidden, error, back, k))
    valid = divisible(square)
    by_reader = jnp.where(valid, back_square, 0.0) / jnp.where(valid, square, 1.0)
    return eta / jnp.maximum(1.0, 2 * chunk * eta * (hidden_square + (by_reader + 1.0) * key_square))


def _written(
    config: SelfModifyingConfig,
    chunk: int,
    start: Residual,
    now: Residual,
    k: jax.Array,
    v: jax.Array,
    eta: jax.Array,
    log_alpha: jax.Array,
) -> Residual:
    """A memory after tokens of one of its chunks. eta, log_alpha: [batch, n, heads]."""
    hidden, pull = jax.vjp(_gelu, _times(start.W2, k))
    read = (k if start.skip is None else _times(start.skip, k)) + _times(start.W1, hidden)
    error = 2.0 * (read - _apply(start, v))
    if config.bounded:
        assert _BOUND.slope is not None
        error = within_slope(_BOUND.slope, error)
    back = pull(_times(jnp.swapaxes(start.W1, -1, -2), error))[0]
    if config.bounded:
        # The limit is a constant of the outer gradient: its own derivative was not finite where errors nearly vanish.
        eta = _within_step(eta, chunk, *jax.lax.stop_gradient((error, hidden, back, k)))

    total = jnp.cumsum(log_alpha, axis=1)
    before = total - log_alpha
    last = total[:, -1:]
    by_token = lambda a: jnp.moveaxis(a, 1, 2)  # [batch, heads, n, …]
    # L_ts = (α_{s+1} ⋯ α_{t−1}) η_s k_s·k_t for s < t. The mask comes before the exponential, which would overflow above it.
    inside = jnp.tril(jnp.ones((k.shape[1],) * 2, bool), -1)
    distance = by_token(before)[..., :, None] - by_token(total)[..., None, :]
    decay = jnp.exp(jnp.where(inside, distance, -jnp.inf))
    scores = jnp.einsum("bthi,bshi->bhts", k, k, precision=jax.lax.Precision.HIGHEST)
    system = decay * scores * by_token(eta)[..., None, :]
    rest, write = jnp.exp(last[:, 0]), eta * jnp.exp(last - total)  # of what was there before, and of each token

    def delta(weight: jax.Array, error: jax.Array) -> jax.Array:
        """`weight` after W ← W (α I − η k kᵀ) − η error kᵀ for every token."""
        target = _times(weight, k) * jnp.exp(before)[..., None] + error
        solved = jax.scipy.linalg.solve_triangular(
            system + jnp.eye(k.shape[1], dtype=system.dtype), by_token(target), lower=True, unit_diagonal=True
        )
        return _moved(weight, rest, write, jnp.moveaxis(solved, 2, 1), k)

    skip = None if now.skip is None else delta(now.skip, error)
    return Residual(_moved(now.W1, rest, write, error, hidden), delta(now.W2, back), skip)


def _moved(weight: jax.Array, rest: jax.Array, write: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """rest · W − Σ_t write_t left_t right_tᵀ."""
    change = jnp.einsum("bnh,bnho,bnhi->bhoi", write, left, right, precision=jax.lax.Precision.HIGHEST)
    return rest[..., None, None] * weight - change
