"""The first GPU kernel of the chunkwise memory: the states before each chunk.

State, tokens and results are references, and what one phase writes the next one reads after a barrier: a value that is held across
the loop over tiles of the hidden width takes registers in all its iterations, and Triton spills what does not fit.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import BEGINS, EMPTY, Arrays, Index
from pallas_kernels.chunk_memory.gpu_bound import BoundedSteps, Solved, solved
from pallas_kernels.chunk_memory.gpu_step import (
    Block,
    ScratchBlock,
    Settings,
    Step,
    Tokens,
    barrier,
    copy,
    num_warps,
    places,
    rows_call,
    thresholds,
    zero,
)
from pallas_kernels.chunk_scan import Restarts


class _Given(NamedTuple):
    """Inputs: the first carry, one place each, the tokens, and the marks and the weights of segments."""

    first: Any
    tokens: Any
    marks: Any
    start: Any


class _Found(NamedTuple):
    """Results, as of `states`. scratch: g of each block with bounded steps."""

    before: Any
    kept: Any
    of_steps: Any
    scratch: Any


def states(
    settings: Settings, carry: Arrays, tokens: Tokens, restarts: Restarts
) -> tuple[Arrays, jax.Array | None, Solved | None]:
    """The carry before each chunk and after the last, [rows, chunks + 1, out, in] each. With limits, also the factors
    [rows, chunks, len(carry)] by which the carry was scaled after each chunk so that the next begins within the limits. With
    bounded steps, also what the other kernel needs of them.

    Args:
      settings: what is static.
      carry, restarts: as in `gpu.memory_scan`.
      tokens: the tokens of all chunks.
    """
    chunk, named, step = settings.chunk, settings.named, settings.step(carry)
    chunks = tokens["scales"].shape[1]

    def kernel(given: Any, found: Any) -> None:
        _States(settings, step, given, found).run()

    # One array for all of them: XLA would compile the loop around a store that depends on the chunk once for each of its outcomes.
    before = named([jax.ShapeDtypeStruct((chunks + 1, *x.shape[1:]), jnp.float32) for x in carry])
    marks, start = (None, ()) if restarts is None else restarts
    given = _Given(
        named([x[:, None] for x in carry]), tokens, marks, dict(zip(chunk.names, (x[:, None] for x in start)))
    )
    kept = None if settings.limits is None else jax.ShapeDtypeStruct((chunks, len(carry)), jnp.float32)
    of_steps = None if chunk.step_bound is None else solved(chunk, tokens)
    scratch = [] if of_steps is None else [jax.ShapeDtypeStruct(v.shape[2:], jnp.float32) for _, v in tokens["blocks"]]
    found = _Found(before, kept, of_steps, scratch)
    warps = num_warps(tokens, backward=False)
    found = rows_call(kernel, given, found, "chunk_memory_states", warps=warps, interpret=settings.interpret)
    return settings.flat(found.before), found.kept, found.of_steps


@dataclasses.dataclass(frozen=True)
class _States:
    """The kernel for one row."""

    settings: Settings
    step: Step
    given: _Given
    found: _Found

    @property
    def chunks(self) -> int:
        return self.given.tokens["scales"].shape[0]

    def wait(self) -> None:
        barrier(self.settings.interpret)

    def run(self) -> None:
        for source, target in zip(self.given.first, self.found.before):
            copy(self.step, source, 0, target, 0)
        self.wait()
        jax.lax.fori_loop(0, self.chunks, self.advance, None)

    def advance(self, i: Index, _: None) -> None:
        scales = tuple(self.given.tokens["scales"][i, place] for place in range(3))
        blocks, gradients = self.gradients(i)
        self.step.tiles(lambda j, _: self.write(i, scales, blocks, gradients, j), None)
        self.wait()
        if self.given.marks is not None:
            self.begin_segment(i)
            self.wait()
        if self.step.limits is not None:
            # The state after the last chunk is not within its limits: a chunk of another call limits it, at its start.
            pl.when(i + 1 < self.chunks)(functools.partial(self.limit, i + 1, i))
            self.wait()

    def gradients(self, i: Index) -> tuple[Sequence[Block], list[jax.Array]]:
        """The tokens of chunk i, and ∇ℓ of W_outer h of each block."""
        tokens, step, before = self.given.tokens, self.step, self.found.before
        of_steps = self.found.of_steps
        if of_steps is None:
            free = [Block(*refs, i) for refs in zip(tokens["blocks"], tokens["weights"], thresholds(tokens))]
            return free, [step.gradient(block, out) for block, out in zip(free, step.outs(free, before[0], i))]
        parts = zip(tokens["blocks"], of_steps["weights"], thresholds(tokens))
        more = zip(parts, self.found.scratch, places(tokens["blocks"]))
        blocks = [ScratchBlock(*refs, i, g, g, place) for refs, g, place in more]
        bounded = BoundedSteps(self.settings, step, blocks, before, tokens["step_gates"], of_steps, i)
        for block, out in zip(blocks, step.outs(blocks, before[0], i)):
            block.g[...] = step.gradient(block, out)
            bounded.store_decrease(block, out)
        for store in (bounded.store_products, bounded.store_equations, bounded.store_weights):
            self.wait()
            store()
        self.wait()
        return blocks, [block.g[...] for block in blocks]

    def write(
        self, i: Index, scales: Arrays, blocks: Sequence[Block], gradients: Sequence[jax.Array], j: Index
    ) -> None:
        """Tile j of the state after chunk i."""
        step, before = self.step, self.found.before
        outer, inner, dot = step.layers.outer, step.layers.inner, step.dot
        a, s, beta = scales
        old = [step.load(part, i, j) for part in before]
        w = old[0]
        new = [{name: a * x for name, x in w.items()}]
        if len(old) > 1:
            new[0] = {name: x + s * old[1][name] for name, x in new[0].items()}
            new.append({name: beta * x for name, x in old[1].items()})
        for block, g in zip(blocks, gradients):
            h, left = step.gradients(block, g, w, j)
            left[outer] = g
            for part, weight in zip(new, block.weights):
                for name in (outer, *inner):
                    part[name] += dot(left[name] * weight, h if name == outer else block.k, 0, 0)
        step.store_all(before, i + 1, j, new)

    def begin_segment(self, i: Index) -> None:
        """Replaces the state after chunk i if the next one begins a segment."""
        marks, before = self.given.marks, self.found.before

        # Both sides of `&` are computed, so the mark is read at a chunk that exists.
        @pl.when((i + 1 < self.chunks) & (marks[jnp.minimum(i + 1, self.chunks - 1)] == BEGINS))
        def _() -> None:
            copy(self.step, self.given.start, 0, before[0], i + 1)
            zero(self.step, before[1:], i + 1)

    def limit(self, at: Index, i: Index) -> None:
        """Scales the state at place `at` to its limits, and stores the factors of chunk i. An empty chunk has no limits."""
        step, before, marks = self.step, self.found.before, self.given.marks
        # A square that overflows exceeds any limit.
        scale = lambda x: jnp.where(x > 1.0, jax.lax.rsqrt(jnp.clip(x, 1.0, 3e38)), 1.0)
        scales = jax.tree.map(scale, step.inner(before, at, before, at))
        if marks is not None:
            scales = jax.tree.map(lambda x: jnp.where(marks[at] == EMPTY, 1.0, x), scales)
        flat = self.settings.flat(scales)
        for place, x in enumerate(flat):
            self.found.kept[i, place] = x
        # Most states are within their limits, so most chunks skip this pass over the state.
        over = functools.reduce(jnp.minimum, flat) < 1.0
        pl.when(over)(functools.partial(step.change, before, at, lambda n, name, x, j: scales[n][name] * x))
