"""Sequences that are read in pieces."""

import itertools

import jax
import jax.numpy as jnp

from tests.comparisons import close


def streamed(extend, x, state, cuts):
    """(y, state) after the pieces of x, a tree of arrays [batch, time, …], between the numbers of `cuts`.

    extend: (piece, state) → (y, state). States keep their shapes and dtypes.
    """
    pieces, kinds = [], jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for start, stop in itertools.pairwise(cuts):
        y, state = extend(jax.tree.map(lambda x, cut=slice(start, stop): x[:, cut], x), state)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == kinds
        pieces.append(y)
    return jnp.concatenate(pieces, axis=1), state


def check_rows_apart(extend, x, expected, state, starts, every_cuts):
    """Rows of a stream may have read different numbers of tokens: two of `starts`, before pieces that are cut in several ways.

    x: as for `streamed`, two rows; expected: its outputs; state: an empty one.
    """
    states = [streamed(extend, x, state, [0, start])[1] for start in starts]
    mixed = jax.tree.map(lambda a, b: jnp.stack([a[0], b[1]]), *states)
    for cuts in every_cuts:
        part = lambda x, size=cuts[-1]: jnp.stack([x[row, start : start + size] for row, start in enumerate(starts)])
        y, _ = streamed(extend, jax.tree.map(part, x), mixed, cuts)
        close(y, part(expected))
