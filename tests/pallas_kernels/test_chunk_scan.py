"""The scan over chunks against a loop: chunks of one program, segments, heads."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arguments import BEGINS, CONTINUES, EMPTY
from pallas_kernels.chunk_program import Unroll
from pallas_kernels.chunk_scan import chunk_scan
from tests.marks import if_slow

BATCH, HEADS, SIZE, DIM = 2, 2, 8, 16
TOLERANCE = 2e-6


def chunk(carry, xs):
    """A matrix W and its momentum S, written by the chunk's tokens and read before."""
    (w, s), (x, gates) = carry, xs
    s = gates[0, 0] * s + 0.1 * jnp.tanh(x.T @ (x * gates[1][:, None]))
    return (jnp.cos(w) + s, s), (x @ w + x,)


def arguments(count, time):
    keys = iter(jax.random.split(jax.random.key(count), 5))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    carry = normal(BATCH, HEADS, DIM, DIM), normal(BATCH, HEADS, DIM, DIM)
    gates = jax.nn.sigmoid(normal(BATCH, HEADS, count, 2, SIZE))
    return carry, (normal(BATCH, time, HEADS, DIM),), gates, normal(BATCH, HEADS, DIM, DIM)


def loop(carry, tokens, gates, start, marks):
    """Row by row and chunk by chunk. Marks are numbers."""
    time, count = tokens[0].shape[1], gates.shape[2]
    x = jnp.pad(tokens[0], ((0, 0), (0, count * SIZE - time), (0, 0), (0, 0))).swapaxes(1, 2)
    ys, finals = [], []
    for row in range(BATCH):
        state, y = tuple(c[row] for c in carry), []
        for i in range(count):
            mark = CONTINUES if marks is None else marks[row][i]
            if mark == BEGINS:
                state = start[row], jnp.zeros_like(state[1])
            of_chunk = x[row, :, i * SIZE : (i + 1) * SIZE]
            if mark != EMPTY:
                state, (of_chunk,) = jax.vmap(chunk)(state, (of_chunk, gates[row, :, i]))
            y.append(0.0 * of_chunk if mark == EMPTY else of_chunk)
        ys.append(jnp.concatenate(y, axis=1))
        finals.append(state)
    return tuple(map(jnp.stack, zip(*finals))), (jnp.stack(ys).swapaxes(1, 2)[:, :time],)


C, B, E = CONTINUES, BEGINS, EMPTY
MARKS = {
    "one segment": None,
    "segments": [[C, C, B, C, C, B, B, E], [B, B, C, C, E, E, E, E]],
    "all of one, none of the other": [[C] * 8, [E] * 8],
}


UNROLLS = {"one by one": Unroll(), "two and four": Unroll(2, 4), "four and two": Unroll(4, 2)}
# Every two of the three choices meet once by default.
BY_DEFAULT = {
    ("one by one", "one segment", 2), ("one by one", "segments", 1), ("two and four", "one segment", 1),
    ("two and four", "segments", 2), ("four and two", "segments", 1), ("four and two", "all of one, none of the other", 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("unrolled", "marked", "together"),
    [case if case in BY_DEFAULT else if_slow(*case) for case in itertools.product(UNROLLS, MARKS, (1, 2))],
)
def test_values_and_gradients(unrolled, marked, together):
    unroll, marks = UNROLLS[unrolled], MARKS[marked]
    carry, tokens, gates, start = arguments(8, 61)
    d = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size).reshape(x.shape)), loop(carry, tokens, gates, start, marks))

    def kernel(carry, tokens, gates, start):
        restarts = None if marks is None else (jnp.asarray(marks), (start,))
        return chunk_scan(
            chunk, carry, tokens, gates, together=together, unroll=unroll, interpret=True, restarts=restarts
        )

    def of(function):
        @jax.jit
        def run(d, *arrays):
            out, pull = jax.vjp(function, *arrays)
            return out, pull(d)

        return run(d, carry, tokens, gates, start)

    expected = of(lambda *arrays: loop(*arrays, marks))
    for found, wanted in zip(jax.tree.leaves(of(kernel)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * max(1.0, float(jnp.abs(wanted).max())))


@pytest.mark.parametrize(("count", "expected"), [(8, (4, 2)), (12, (4, 2)), (6, (2, 2)), (7, (1, 1)), (1, (1, 1))])
def test_a_program_has_chunks_that_divide_their_number(count, expected):
    assert Unroll(4, 2).dividing(count) == expected
