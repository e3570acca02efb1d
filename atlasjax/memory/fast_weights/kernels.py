"""`memory.scan` with the kernels of `pallas_kernels`: the calls they support, and the conversion of a rule to kernel arguments.

`chunk_memory` runs whole chunks of a memory whose gradients are taken at the chunk's start, and rules with constant gradients, for
which the chunk size has no effect. `linear_kernels` runs the other linear rules. Features of keys and queries are computed before
the kernel.
The state is the same as with any other implementation: the XLA engine runs the tokens of an incomplete last chunk, and those of a
chunk in which the call begins. Packed segments are laid on a grid of chunks (`packed`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory import bounds, grid
from atlasjax.memory.axes import objectives, optimizers, retention, structures
from atlasjax.memory.axes.base import is_exactly
from atlasjax.memory.fast_weights import linear_kernels
from atlasjax.memory.fast_weights.fastest import PLATFORMS, fastest
from atlasjax.memory.fast_weights.init import init_state
from atlasjax.memory.fast_weights.packed import head_lengths, layout, pack, without_last_chunk
from atlasjax.memory.fast_weights.scan import state_after, window_count_of, xla_scan
from atlasjax.memory.fast_weights.slots import Carry
from atlasjax.memory.fast_weights.spec import MemorySpec
from atlasjax.memory.fast_weights.state import MemoryParams, MemoryState
from atlasjax.memory.gates import Weights
from atlasjax.memory.tokens import Tokens
from pallas_kernels.arguments import BEGINS, EMPTY, Segments, Window
from pallas_kernels.chunk_memory import CHUNK_SIZES, chunk_memory, unsupported_by_gpu
from pallas_kernels.gpu import too_old
from pallas_kernels.newton_schulz import SCHEDULES, coefficients

_FREE_CHUNK = 64  # where the chunk size has no effect
# Most numbers in a head's weights and momenta. Several copies of them share a core's vector memory, of which a v5p has 64 MiB.
# Two-layer memories of these sizes compile for v5e, v5p and v6e: d = 256 with bfloat16 tokens and chunks of up to 128, d = 192 with
# either float32 or longer chunks, and d = 128 with both.
_MOST_NUMBERS, _LONG_CHUNK = (2**20 + 2**17, 2**19 + 2**17, 2**18), 128
# Muon also keeps the momenta and updates of a few writes there: d = 128 for Atlas. With d = 256 its backward kernel needs 166 MiB
# with one write at a time.
_MOST_NUMBERS_OF_MUON = 2**18 + 2**17


@dataclasses.dataclass(frozen=True)
class _Branch:
    """A structure without its residual r(x), which the caller adds. The gradient at (out, v) equals that at (out − r, v − r)."""

    structure: structures.MLP | structures.GatedMLP

    def apply(self, linear: structures.Linear, x: jax.Array, skip: jax.Array | None, norm: Mapping | None) -> jax.Array:
        return self.structure.apply(linear, x, jnp.zeros((), jnp.float32), norm)


def _known(rule: MemorySpec) -> dict[str, tuple[object, bool]]:
    """Name → the rule's choice, and whether the kernels support it: exactly a listed class, not a subclass.

    Any feature map is supported, because it is applied before the kernels.
    """
    supported: dict[str, tuple[type, ...]] = {
        "structure": (structures.Matrix, structures.MLP, structures.GatedMLP),
        "objective": (
            objectives.L2,
            objectives.DotProduct,
            objectives.Lp,
            objectives.DeltaKeys,
            objectives.RemoveAndReplace,
        )
        + (objectives.Huber,) * (rule.window == 1 and not rule.uses_muon),
        "optimizer": (optimizers.GradientDescent, optimizers.Implicit, optimizers.Momentum, optimizers.Muon),
        "retention": (retention.Full, retention.Scalar)
        + (retention.Channel,) * (linear_kernels.kernel_of(rule) is not None),
    }
    return {name: (getattr(rule, name), is_exactly(getattr(rule, name), *kinds)) for name, kinds in supported.items()}


def kernel_of(rule: MemorySpec) -> str:
    """The kernel for a rule, if its calls are supported: a name in `fastest.KERNELS`."""
    linear = linear_kernels.kernel_of(rule)
    if linear is not None:
        return linear
    if rule.uses_muon:
        return "chunk_memory_muon"
    return "chunk_memory" if rule.step_bound is None else "chunk_memory_bounded"


def unsupported(
    implementation: str, rule: MemorySpec, params: MemoryParams, state: MemoryState | None, q: jax.Array, packed: bool
) -> str | None:
    """The reason why "pallas_tpu" or "pallas_gpu" cannot run a call, with the relevant shapes, or None if it can.

    Args:
      implementation: "pallas_tpu" or "pallas_gpu".
      rule, params, state: as in `memory.scan`.
      q: [batch, time, heads, key_dim].
      packed: whether there are segment ids.
    """
    time = q.shape[1]
    numbers = sum(math.prod(w.shape[1:]) for w in params.weights.values()) * (1 + rule.optimizer.has_momentum)
    on_gpu = implementation == "pallas_gpu"
    most = math.inf if on_gpu else _MOST_NUMBERS[(q.dtype == jnp.float32) + (rule.chunk_size > _LONG_CHUNK)]
    if rule.uses_muon and not on_gpu:
        most = _MOST_NUMBERS_OF_MUON
    every = rule.optimizer.every
    reasons = {
        **{f"{name}={value!r}": not known for name, (value, known) in _known(rule).items()},
        f"q is {q.dtype}, must be float32 or bfloat16": q.dtype not in (jnp.float32, jnp.bfloat16),
        f"structure={rule.structure!r} has an inner LayerNorm": rule.structure.norm and (on_gpu or rule.uses_muon),
        f"optimizer={rule.optimizer!r} has a step size per channel": rule.optimizer.per_channel,
        f"optimizer={rule.optimizer!r} writes every {every} tokens, which is not a power of two": bool(
            every & (every - 1)
        ),
        f"the weights {_shapes(params)} and their momenta have {numbers:,} numbers per head, more than {most:,}": numbers
        > most,
    }
    is_linear = linear_kernels.kernel_of(rule) is not None
    if is_linear:
        reasons |= linear_kernels.unsupported(params.weights["W"])
    elif not rule.has_constant_gradient:
        reasons[f"chunk_size={rule.chunk_size}, must be one of {CHUNK_SIZES}"] = rule.chunk_size not in CHUNK_SIZES
        reasons[f"{time} tokens are less than one chunk of {rule.chunk_size}"] = time < rule.chunk_size and not packed
    if on_gpu and (old := too_old()) is not None:
        reasons[old] = True
    if on_gpu and not is_linear and not any(reasons.values()):
        size = _FREE_CHUNK if rule.has_constant_gradient else rule.chunk_size
        reason = unsupported_by_gpu(
            rule.structure, params.weights, size, q.dtype, muon=rule.uses_muon, step_bound=rule.step_bound
        )
        if reason is not None:
            reasons[reason] = True
    return next((reason for reason, applies in reasons.items() if applies), None)


@functools.partial(jax.jit, static_argnames=("implementation", "rule", "max_segments"))
def pallas_scan(
    implementation: str,
    rule: MemorySpec,
    params: MemoryParams,
    state: MemoryState | None,
    tokens: Tokens,
    max_segments: int | None = None,
) -> tuple[jax.Array, MemoryState]:
    """`xla_scan` by "pallas_tpu" or "pallas_gpu", for a call that it supports. There is no forward-mode derivative."""
    batch, time = tokens.q.shape[:2]
    before = init_state(rule, params, batch_size=batch) if state is None else state
    tokens = tokens._replace(gates=rule.within_horizon(tokens.gates))  # before padding, whose θ is 1
    kernel = linear_kernels.kernel_of(rule)
    if kernel == "linear_rule" and implementation == "pallas_gpu":
        # Its kernel is of the memory alone; the places of tokens are those of the XLA engine.
        return xla_scan(rule, params, state, tokens, max_segments, by_kernel=True)
    if kernel is not None:
        return linear_kernels.scan(implementation, rule, params, before, tokens, max_segments, _FREE_CHUNK)
    inside = state is not None and state.position is not None
    if tokens.segment_ids is not None or inside:
        return _packed(implementation, rule, params, before, tokens, max_segments, inside=inside)
    chunk = _chunk_size(rule)
    whole = time if rule.has_constant_gradient else time // chunk * chunk
    cut = lambda which: jax.tree.map(lambda x: x[:, which], tokens)
    first = cut(slice(whole))
    y, memory, momentum = _chunks(implementation, rule, params, before, state, first)
    where = grid.aligned_layout(batch, whole, chunk, rule.window, window_count_of(before))
    carry = Carry(memory, momentum, None, memory)
    after = state_after(rule, before, carry, where, first)
    if whole == time:
        return y, after
    rest, after = xla_scan(rule, params, after, cut(slice(whole, None)))
    return jnp.concatenate([y, rest], axis=1), after


def _packed(
    implementation: str,
    rule: MemorySpec,
    params: MemoryParams,
    before: MemoryState,
    tokens: Tokens,
    max_segments: int | None,
    *,
    inside: bool,
) -> tuple[jax.Array, MemoryState]:
    """A call with packed segments, or one that may begin inside a chunk (`inside`)."""
    time, chunk = tokens.q.shape[1], _chunk_size(rule)
    where = layout(rule, before, tokens, max_segments, chunk)
    head, state, y_head = None, before, None
    if inside:
        head = head_lengths(where, chunk)
        first = jax.tree.map(lambda x: x[:, : chunk - 1], tokens._replace(segment_ids=None))
        y_head, state = xla_scan(rule, params, before, first, lengths=head)
    packed = pack(rule, params, before, where, tokens, chunk, head)
    scan = functools.partial(_chunks, implementation, rule, params, state, state, packed.tokens)
    y, memory, momentum = scan(segments=packed.segments)
    y = packed.pick(y)
    if head is not None and y_head is not None:
        y_head = jnp.pad(y_head, ((0, 0), (0, time - y_head.shape[1]), (0, 0), (0, 0)))
        y = jnp.where((jnp.arange(time) < head[:, None])[:, :, None, None], y_head, y)
    chunk_start = memory
    if before.chunk_start is not None:
        # The memory before an incomplete last chunk. Training does not use it, so that there these kernels do not run.
        cut = without_last_chunk(packed.segments, where.position > 0)
        chunk_start = scan(segments=cut)[1]
        last = jnp.max(jnp.where(packed.segments.marks != EMPTY, jnp.arange(where.num_slots), -1), axis=1)
        if cut.start is not None:
            begins = jnp.take_along_axis(packed.segments.marks, last[:, None], axis=1)[:, 0] == BEGINS
            initial = jax.tree.map(lambda w, x: jnp.broadcast_to(w, x.shape), cut.start, chunk_start)
            chunk_start = grid.choose(begins & (last >= 0), initial, chunk_start)
        chunk_start = rule.begin_chunk(chunk_start)
        if inside:  # all tokens are in the chunk in which the call begins
            chunk_start = grid.choose(last < 0, before.chunk_start, chunk_start)
    carry = Carry(memory, momentum, None, chunk_start)
    return y, state_after(rule, before, carry, where, tokens)


@dataclasses.dataclass(frozen=True)
class _Pallas:
    """The kernels of one platform as a `backends.Backend`."""

    name: str
    is_partitioned = False

    @property
    def platform(self) -> str | None:
        return PLATFORMS[self.name]

    def unsupported(
        self, rule: MemorySpec, params: MemoryParams, state: MemoryState | None, q: jax.Array, packed: bool
    ) -> str | None:
        return unsupported(self.name, rule, params, state, q, packed)

    def is_preferred(self, rule: MemorySpec, q: jax.Array, v: jax.Array) -> bool:
        """Whether it is recorded as faster than the XLA engine for tokens of these sizes; see `fastest`."""
        if q.shape[-1] != v.shape[-1]:
            return False
        return fastest(kernel_of(rule), q.shape[-1], q.dtype).get(PLATFORMS[self.name]) == self.name

    def scan(
        self, rule: MemorySpec, params: MemoryParams, state: MemoryState | None, *call: Any
    ) -> tuple[jax.Array, MemoryState]:
        *tokens, max_segments = call
        return pallas_scan(self.name, rule, params, state, Tokens(*tokens), max_segments)


PALLAS = tuple(_Pallas(name) for name in PLATFORMS)


def _shapes(params: MemoryParams) -> dict[str, tuple[int, ...]]:
    return {name: w.shape[1:] for name, w in params.weights.items()}


def _featured(rule: MemorySpec, params: MemoryParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """φ(x) and r(x) of x [batch, time, heads, key_dim], float32."""
    x = x.astype(jnp.float32)
    if rule.features.is_identity:
        return x, x
    by_head = lambda f: jax.vmap(f, in_axes=(0, 2), out_axes=2)(params.coefficients, x)
    return by_head(rule.features.apply), by_head(rule.features.degree_one)


def _chunk_size(rule: MemorySpec) -> int:
    """Tokens per chunk of the kernels."""
    return _FREE_CHUNK if rule.has_constant_gradient else rule.chunk_size


def _chunks(
    implementation: str,
    rule: MemorySpec,
    params: MemoryParams,
    before: MemoryState,
    past: MemoryState | None,
    tokens: Tokens,
    segments: Segments | None = None,
) -> tuple[jax.Array, Weights, Weights | None]:
    """Whole chunks from the start of a chunk, or any number of tokens where the chunk size has no effect: y, M and S.

    past: the state whose window precedes the first token. None means that nothing does. segments: as in `chunk_memory`.
    """
    q, k, v, gates, _ = tokens
    structure: Any = rule.structure
    apart = structure.residual and not rule.features.is_identity
    if apart:
        structure = _Branch(structure)
    query, query_skip = _featured(rule, params, q)

    def written(
        k: jax.Array, v: jax.Array, threshold: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Keys and values of the kernel, and their floor."""
        key, skip = _featured(rule, params, k)
        wide = v.astype(jnp.float32)
        value = wide - skip if apart and not rule.objective.gradient_is_value else v
        floor = None
        if rule.step_bound is not None:
            # Uses v without the residual subtracted: the output of zero is that of the whole memory, not of the branch.
            empty = bounds.toward_target(rule.limited_objective, jnp.zeros_like(wide), wide, threshold)
            floor = bounds.softened(jnp.zeros((), jnp.float32), jnp.maximum(jnp.sum(empty, axis=-1), 0.0))
        return key.astype(q.dtype), value.astype(q.dtype), floor

    key, value, floor = written(k, v, gates.threshold)
    window = None
    if past is not None and past.window_keys is not None:
        assert past.window_values is not None
        assert past.window_count is not None
        by_token = lambda x: jnp.swapaxes(x, 1, 2)
        keys, values, of_window = written(by_token(past.window_keys), by_token(past.window_values), None)
        of_window = None if of_window is None else by_token(of_window)
        window = Window(by_token(keys), by_token(values), past.window_count, of_window)
    assert gates.step_size is not None
    muon: dict[str, Any] = {}
    if rule.uses_muon:
        optimizer: Any = rule.optimizer
        triples = coefficients(SCHEDULES[optimizer.schedule], optimizer.steps)
        muon = {"newton_schulz": triples, "every": optimizer.every}
    y, memory, momentum = chunk_memory(
        structure, rule.limited_objective, before.memory, before.momentum, query.astype(q.dtype), key, value,
        step_size=gates.step_size, retention=gates.retention, momentum_decay=gates.momentum_decay,
        write_size=gates.write_size, window_weights=gates.window_weights, implementation=implementation,
        chunk_size=_chunk_size(rule), step_bound=rule.step_bound, horizon=rule.horizon, floor=floor, threshold=gates.threshold,
        norm_bound=rule.norm_bound, window=window, segments=segments, norm=params.norm, **muon,
    )  # fmt: skip
    if apart:
        y = (y + query_skip).astype(q.dtype)
    return y, memory, momentum
