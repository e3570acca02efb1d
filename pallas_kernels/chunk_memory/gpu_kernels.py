"""The two GPU kernels of the chunkwise memory: the states before each chunk, and their cotangents."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import BEGINS, EMPTY, Arrays, Index, Interpret
from pallas_kernels.chunk_memory.chunk import MemoryChunk
from pallas_kernels.chunk_memory.gpu_bound import BoundedSteps, Solved, StepCotangents, scratch_of_steps, solved
from pallas_kernels.chunk_memory.gpu_step import (
    Block,
    Matrices,
    Refs,
    ScratchBlock,
    Tokens,
    barrier,
    copy,
    num_warps,
    places,
    rows_call,
    settings,
    thresholds,
    zero,
)
from pallas_kernels.chunk_scan import Restarts


def states(
    chunk: MemoryChunk,
    limits: tuple[float, ...] | None,
    interpret: Interpret,
    carry: Arrays,
    tokens: Tokens,
    restarts: Restarts,
    dtype: jax.typing.DTypeLike,
) -> tuple[Arrays, Arrays, jax.Array | None, Solved | None]:
    """The carry before each chunk, [rows, chunks, out, in] each, and after the last, [rows, out, in]. With limits, also the factors
    [rows, chunks, len(carry)] by which the carry was scaled after each chunk so that the next begins within the limits. With
    bounded steps, also what the other kernel needs of them.

    Args:
      chunk, limits, interpret, carry, restarts: as in `gpu.memory_scan`.
      tokens: the tokens of all chunks.
      dtype: dtype of the tokens, which determines the precision of products.
    """
    step, named = settings(chunk, limits, carry, dtype, interpret)
    outer, inner, dot = step.layers.outer, step.layers.inner, step.dot
    chunks = tokens["scales"].shape[1]

    def limit(before: list[Refs], at: Index, kept: jax.Ref, i: Index, marks: jax.Ref | None) -> None:
        """Scales the state at slot `at` to its limits, and stores the factors of chunk i. An empty chunk has no limits."""
        # A square that overflows exceeds any limit.
        scale = lambda x: jnp.where(x > 1.0, jax.lax.rsqrt(jnp.clip(x, 1.0, 3e38)), 1.0)
        scales = jax.tree.map(scale, step.inner(before, at, before, at))
        if marks is not None:
            scales = jax.tree.map(lambda x: jnp.where(marks[at] == EMPTY, 1.0, x), scales)
        flat = [part[name] for part in scales for name in chunk.names]
        for place, x in enumerate(flat):
            kept[i, place] = x
        over = functools.reduce(jnp.minimum, flat) < 1.0
        pl.when(over)(functools.partial(step.change, before, at, lambda n, name, x, j: scales[n][name] * x))

    def chunk_memory_states(refs: Any, results: Any) -> None:
        first, tokens, marks, start = refs
        before, last, kept, of_steps, scratch = results
        for source, target in zip(first, before):
            copy(step, source, 0, target, 0)
        barrier(interpret)

        def gradients_of(i: Index) -> tuple[Sequence[Block], list[jax.Array]]:
            """The tokens of chunk i, and ∇ℓ of W_outer h of each block."""
            if of_steps is None:
                free = [Block(*refs, i) for refs in zip(tokens["blocks"], tokens["weights"], thresholds(tokens))]
                return free, [step.gradient(block, out) for block, out in zip(free, step.outs(free, before[0], i))]
            parts = zip(tokens["blocks"], of_steps["weights"], thresholds(tokens))
            more = zip(parts, scratch, places(tokens["blocks"]))
            blocks = [ScratchBlock(*refs, i, g, g, place) for refs, g, place in more]
            bounded = BoundedSteps(chunk, step, interpret, blocks, before, tokens["step_gates"], of_steps, i)
            for block, out in zip(blocks, step.outs(blocks, before[0], i)):
                block.g[...] = step.gradient(block, out)
                bounded.store_decrease(block, out)
            for store in (bounded.store_products, bounded.store_equations, bounded.store_weights):
                barrier(interpret)
                store()
            barrier(interpret)
            return blocks, [block.g[...] for block in blocks]

        def advance(i: Index, _: None) -> None:
            a, s, beta = (tokens["scales"][i, place] for place in range(3))
            blocks, gradients = gradients_of(i)

            def write(j: Index, _: None) -> None:
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
                put = functools.partial(step.store_all, j=j, values=new)
                pl.when(i + 1 < chunks)(functools.partial(put, before, i + 1))
                pl.when(i + 1 == chunks)(functools.partial(put, last, 0))

            step.tiles(write, None)
            barrier(interpret)
            if marks is not None:

                @pl.when((i + 1 < chunks) & (marks[jnp.minimum(i + 1, chunks - 1)] == BEGINS))
                def _() -> None:
                    copy(step, start, 0, before[0], i + 1)
                    zero(step, before[1:], i + 1)

                barrier(interpret)
            if step.limits is not None:
                pl.when(i + 1 < chunks)(functools.partial(limit, before, i + 1, kept, i, marks))
                barrier(interpret)

        jax.lax.fori_loop(0, chunks, advance, None)

    shapes = lambda count: named([jax.ShapeDtypeStruct((count, *x.shape[1:]), jnp.float32) for x in carry])
    marks, start = (None, ()) if restarts is None else restarts
    inputs = (named([x[:, None] for x in carry]), tokens, marks, dict(zip(chunk.names, (x[:, None] for x in start))))
    kept = None if limits is None else jax.ShapeDtypeStruct((chunks, len(carry)), jnp.float32)
    of_steps = None if chunk.step_bound is None else solved(chunk, tokens)
    scratch = [] if of_steps is None else [jax.ShapeDtypeStruct(v.shape[2:], jnp.float32) for _, v in tokens["blocks"]]
    outputs = (shapes(chunks), shapes(1), kept, of_steps, scratch)
    warps = num_warps(tokens, backward=False)
    *results, kept, of_steps, _ = rows_call(chunk_memory_states, inputs, outputs, warps=warps, interpret=interpret)
    before, last = (tuple(part[name] for part in parts for name in chunk.names) for parts in results)
    return before, tuple(x[:, 0] for x in last), kept, of_steps


def state_cotangents(
    chunk: MemoryChunk,
    limits: tuple[float, ...] | None,
    interpret: Interpret,
    before: Arrays,
    kept: jax.Array | None,
    of_steps: Solved | None,
    tokens: Tokens,
    ext: Arrays,
    last: Arrays,
    marks: jax.Array | None,
    dtype: jax.typing.DTypeLike,
) -> tuple[Arrays, Arrays, Arrays]:
    """G_i = ext_i + (∂ state_{i+1} / ∂ state_i)ᵀ G_{i+1}: G after each chunk, and before the first. Shapes as in `states`.

    With marks, also the cotangents of the weights with which segments begin. Nothing passes from a segment to the one before.

    Args:
      chunk, limits, interpret, tokens, dtype: as in `states`.
      before, kept, of_steps: the results of `states`: the carry before each chunk, with limits the factors after each chunk, and
        with bounded steps those of its other results.
      ext: cotangents of the carry before each chunk from everything except the next carry.
      last: cotangents of the carry after the last chunk.
      marks: those of the chunks, as in `gpu.memory_scan`, or None.
    """
    step, named = settings(chunk, limits, before, dtype, interpret)
    outer, inner, dot = step.layers.outer, step.layers.inner, step.dot
    chunks = tokens["scales"].shape[1]

    def through_limit(states: list[Refs], i: Index, after: list[Refs], at: Index, kept: jax.Ref) -> None:
        """The transpose of `limit`: removes the cotangent's component along a state that was scaled to its limit."""
        flat = [kept[at, place] for place in range(len(states) * len(chunk.names))]
        scales = [dict(zip(chunk.names, flat[start:])) for start in range(0, len(flat), len(chunk.names))]

        def project() -> None:
            along = step.inner(states, i, after, at)

            def new(n: int, name: str, x: jax.Array, j: Index) -> jax.Array:
                state = step.part(states[n][name], i, name, j)[...]
                return jnp.where(scales[n][name] < 1.0, scales[n][name] * (x - along[n][name] * state), x)

            step.change(after, at, new)

        pl.when(functools.reduce(jnp.minimum, flat) < 1.0)(project)

    def chunk_memory_cotangents(refs: Any, outputs: Any) -> None:
        states, kept, of_steps, ext, last, tokens, marks = refs
        after, first, start, scratch, more = outputs
        weights = states[0]
        if marks is not None:
            zero(step, [start], 0)
        for source, target in zip(last, after):
            copy(step, source, 0, target, chunks - 1)
        barrier(interpret)

        def advance(t: Index, _: None) -> None:
            i = chunks - 1 - t
            # g = ∇ℓ of W_outer h and d = ∂g/∂out ᵀ dg pass through memory, because they would spill if held in registers.
            of_gradients = tokens["weights"] if of_steps is None else of_steps["weights"]
            parts = zip(tokens["blocks"], of_gradients, thresholds(tokens))
            with_scratch = zip(parts, scratch, places(tokens["blocks"]))
            blocks = [ScratchBlock(*refs, i, g, d, place) for refs, (g, d), place in with_scratch]
            a, s, beta = (tokens["scales"][i, place] for place in range(3))
            outs = step.outs(blocks, weights, i)
            for block, out in zip(blocks, outs):
                block.g[...] = step.gradient(block, out)
            barrier(interpret)

            bounded: StepCotangents | None = None
            if of_steps is not None:
                gates = tokens["step_gates"]
                bounded = StepCotangents(chunk, step, interpret, blocks, states, gates, of_steps, i, more)
                bounded.store_weights_cotangents(after)
                barrier(interpret)
                bounded.store_solution_cotangents()
                barrier(interpret)
                bounded.store_system_cotangents()
                for store in (bounded.store_of_gram, bounded.store_of_factors, bounded.store_of_outer):
                    barrier(interpret)
                    store()
                barrier(interpret)

            def load(j: Index) -> tuple[Matrices, list[Matrices]]:
                """W, and the matrices whose inner products with the gradients have cotangents: of the next W and S, and W and S."""
                along = [] if bounded is None else bounded.along
                return step.load(weights, i, j), [step.load(part, i, j) for part in (*after, *along)]

            def columns(block: ScratchBlock) -> list[jax.Array]:
                """Of these inner products, [E_b, 1]."""
                return [*block.weights, *([] if bounded is None else bounded.columns(block))]

            def weighted(block: ScratchBlock, later: list[Matrices], name: str, x: jax.Array, axis: int) -> jax.Array:
                """Applies the matrices of `load` to one factor x of a weight's gradients."""
                parts = [
                    weight * dot(x, part[name], 1, axis) for part, weight in zip(later, columns(block), strict=True)
                ]
                return functools.reduce(jnp.add, parts)

            def through(block: ScratchBlock, w: Matrices, later: list[Matrices], j: Index) -> tuple[Any, Matrices]:
                """(h, gradients of the projections) with their transpose, and the cotangents of these gradients."""
                primal = jax.vjp(step.factors, step.projections(block, w), dot(block.g[...], w[outer], 1, 0))
                dleft = {name: weighted(block, later, name, block.k, 1) for name in inner}
                if bounded is not None:
                    dleft = {name: x + bounded.of_factor(block, name, j) for name, x in dleft.items()}
                return primal, dleft

            def term(block: ScratchBlock, j: Index) -> jax.Array:
                w, later = load(j)
                if not inner:
                    return weighted(block, later, outer, step.hidden(block, {}, j), 1)
                ((h, _), pullback), dleft = through(block, w, later, j)
                of_left = dot(pullback((jnp.zeros_like(h), dleft))[1], w[outer], 1, 1)
                return of_left + weighted(block, later, outer, h, 1)

            dg = step.sums(blocks, term)
            for block, out, x in zip(blocks, outs, dg):
                total = x if bounded is None else x + bounded.of_outer(block)
                (d,) = jax.vjp(functools.partial(step.gradient, block), out)[1](total)
                block.d[...] = d if bounded is None else d + bounded.of_decrease(block, out)
            barrier(interpret)

            def write(names: tuple[str, ...], j: Index, _: None) -> None:
                w, later = load(j)
                new = [{name: step.part(part[name], i, name, j)[...] for name in names} for part in ext]
                for name in names:
                    new[0][name] += a * later[0][name]
                    if len(after) > 1:
                        new[1][name] += s * later[0][name] + beta * later[1][name]
                for block in blocks:
                    dz: Matrices = {}
                    if inner:
                        ((h, left), pullback), dleft = through(block, w, later, j)
                        dh = weighted(block, later, outer, block.g[...], 0) + dot(block.d[...], w[outer], 1, 0)
                        if bounded is not None:
                            dh = dh + bounded.of_factor(block, outer, j)
                        dz, du = pullback((dh, dleft))
                    else:
                        h, left = step.hidden(block, {}, j), {}
                    for name in names:
                        if bounded is not None:  # its inner products with W and S
                            x, inputs = (left[name], block.k) if name in left else (block.g[...], h)
                            for part, weight in zip(bounded.along_parts, bounded.columns(block), strict=True):
                                new[part][name] += dot(x * weight, inputs, 0, 0)
                        if name in dz:
                            new[0][name] += dot(dz[name], block.k, 0, 0)
                            continue
                        new[0][name] += dot(block.d[...], h, 0, 0)
                        if inner:
                            new[0][name] += dot(block.g[...], du, 0, 0)
                put = functools.partial(step.store_all, j=j, values=new)
                pl.when(i > 0)(functools.partial(put, after, i - 1))
                pl.when(i == 0)(functools.partial(put, first, 0))

            # One after the other, although both need the same factors, because together they spill.
            for names in ((outer,), inner) if inner else ((outer,),):
                step.tiles(functools.partial(write, names), None)
            barrier(interpret)
            if step.limits is not None:
                pl.when(i > 0)(functools.partial(through_limit, states, i, after, i - 1, kept))
                barrier(interpret)
            if marks is not None:

                @pl.when((i > 0) & (marks[i] == BEGINS))
                def _() -> None:
                    step.change([start], 0, lambda n, name, x, j: x + step.part(after[0][name], i - 1, name, j)[...])
                    zero(step, after, i - 1)

                barrier(interpret)

        jax.lax.fori_loop(0, chunks, advance, None)

    shapes = lambda count: named([jax.ShapeDtypeStruct((count, *x.shape[2:]), jnp.float32) for x in ext])
    scratch = [(jax.ShapeDtypeStruct(v.shape[2:], jnp.float32),) * 2 for _, v in tokens["blocks"]]
    more = None if of_steps is None else scratch_of_steps(chunk, tokens, step.width)
    needed = before[: len(chunk.names)] if limits is None and of_steps is None else before
    inputs = (named(needed), kept, of_steps, named(ext), named([x[:, None] for x in last]), tokens, marks)
    outputs = (shapes(chunks), shapes(1), {} if marks is None else shapes(1)[0], scratch, more)
    warps = num_warps(tokens, backward=True)
    *results, start, _, _ = rows_call(chunk_memory_cotangents, inputs, outputs, warps=warps, interpret=interpret)
    after, first = (tuple(part[name] for part in parts for name in chunk.names) for parts in results)
    return after, tuple(x[:, 0] for x in first), tuple(start[name][:, 0] for name in chunk.names if start)
