"""Products, decays and inverses of heads that lie side by side, against those of each head alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import side_by_side, triangular
from tests.marks import if_slow

# Heads, tokens, and two widths. The last three fill a tile.
# By default an odd number of heads, heads in a part of a tile, and heads that fill one.
CASES = [
    if_slow(1, 8, 4, 8),
    if_slow(2, 8, 16, 4),
    (3, 16, 16, 16),
    (4, 4, 8, 24),
    if_slow(2, 64, 16, 64),
    (4, 32, 32, 8),
    if_slow(1, 128, 16, 128),
]


def random(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def merged(x):
    """[P, m, n] → [m, P · n]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


def check(ours, definition, *args):
    """Values and gradients of `ours`, of matrices side by side, and of `definition`, of one head."""
    d = random(*jax.eval_shape(jax.vmap(definition), *args).shape)

    def graded(function, d):
        found, pull = jax.vjp(function, *args)
        return found, *pull(d)

    expected, *pulled = jax.jit(lambda d: graded(jax.vmap(definition), d))(d)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda d: graded(lambda *args: ours(*map(merged, args)), d))(merged(d))
    for a, b in zip(found, (merged(expected), *pulled), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(("heads", "size", "a", "b"), CASES)
def test_products_are_those_of_each_head(heads, size, a, b):
    check(functools.partial(side_by_side.times, heads=heads), jnp.matmul, random(heads, size, a), random(heads, a, b))
    transposed = lambda x, y: x @ y.T
    check(
        functools.partial(side_by_side.times_transposed, heads=heads),
        transposed,
        random(heads, size, a),
        random(heads, b, a),
    )
    first = lambda x, y: x.T @ y
    check(
        functools.partial(side_by_side.transposed_times, heads=heads),
        first,
        random(heads, size, a),
        random(heads, size, b),
    )


@pytest.mark.parametrize(("heads", "size", "a", "b"), CASES)
def test_a_weighted_outer_product_is_that_of_each_head(heads, size, a, b):
    ours = lambda x, y, weights: side_by_side.weighted_outer(x, y, side_by_side.rows_of(weights, heads))
    of_head = lambda x, y, weights: x.T @ (weights.T * y)
    check(ours, of_head, random(heads, size, a), random(heads, size, b), random(heads, 1, size))


@pytest.mark.parametrize(("heads", "size", "width", "_"), CASES)
def test_systems_and_decays_are_those_of_each_head(heads, size, width, _):
    strict = lambda x: jnp.where(jnp.tri(size, k=-1) > 0, x, 0.0)

    def inverse(x):
        return jax.scipy.linalg.solve_triangular(
            jnp.eye(size) + strict(x), jnp.eye(size), lower=True, unit_diagonal=True
        )

    # As large as products of unit keys are. Standard normal entries make an inverse of 1e14, and no two algorithms agree on it.
    lower = jax.vmap(strict)(random(heads, size, size)) / size**0.5
    masked = lambda x: triangular.unit_lower_inverse(x, heads)
    check(masked, inverse, lower)

    def solution(x, row):  # [m, m], [1, m]
        return jax.scipy.linalg.solve_triangular(jnp.eye(size) + strict(x), row.T, lower=True, unit_diagonal=True).T

    def solved(x, rows):  # [m, P · m], [1, P · m]
        found = triangular.solve_column(x, side_by_side.columns_of(rows, heads), heads)
        return side_by_side.rows_of_columns(found, heads)

    check(solved, solution, lower, random(heads, 1, size))

    def solution_of(x, right):  # [m, m], [m, n]
        return jax.scipy.linalg.solve_triangular(jnp.eye(size) + strict(x), right, lower=True, unit_diagonal=True)

    solve = lambda x, right: triangular.solve(x, right, masked(jax.lax.stop_gradient(x)), None, heads)
    check(solve, solution_of, lower, random(heads, size, width))


TILES = [
    if_slow(1, 8),
    (3, 16),
    (4, 4),
    if_slow(1, 128),
    if_slow(2, 64),
    (4, 32),
    (8, 16),
    if_slow(16, 8),
]  # heads and tokens; the last four fill a tile


@pytest.mark.parametrize(("heads", "size"), TILES)
def test_decays_are_those_of_each_head(heads, size):
    """Also where a decay is zero, and with derivatives of the products and of those from the start."""

    def products(decay):  # [1, m]
        row, lane = jnp.arange(size)[:, None], jnp.arange(size)
        each = jnp.where((row[..., None] >= jnp.arange(size)) & (jnp.arange(size) > lane[:, None]), decay[0], 1.0)
        return jnp.where(row >= lane, jnp.prod(each, axis=-1), 0.0)

    def start(decay):
        return jnp.broadcast_to(jnp.cumprod(decay[0])[:, None], (size, size if heads > 1 else 1))

    decay = jax.nn.sigmoid(random(heads, 1, size) + 2).at[:, 0, size // 2].set(0.0)
    check(lambda decay: triangular.decay_products(decay, heads)[0], products, decay)
    check(lambda decay: triangular.decay_products(decay, heads)[1], start, decay)


@pytest.mark.parametrize(("heads", "size"), TILES)
def test_columns_are_in_all_lanes_of_their_head(heads, size):
    in_lanes = lambda column, width=size: jnp.broadcast_to(column[:, None], (size, width if heads > 1 else 1))
    rows, x = random(heads, 1, size), random(heads, size, size)
    check(lambda rows: side_by_side.columns_of(rows, heads), lambda row: in_lanes(row[0]), rows)
    check(lambda x: side_by_side.first_column(x, heads), lambda x: in_lanes(x[:, 0]), x)
    check(lambda x: side_by_side.diagonal_column(x, heads), lambda x: in_lanes(jnp.diagonal(x)), x)
    for width in (size, 24, 128, 256):
        wide = lambda rows, width=width: side_by_side.spread(side_by_side.rows_of(rows, heads), heads, width)
        check(wide, lambda row, width=width: in_lanes(row[0], width), rows)
        wide = lambda rows, width=width: side_by_side.widened(side_by_side.columns_of(rows, heads), heads, width)
        check(wide, lambda row, width=width: in_lanes(row[0], width), rows)


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_lanes_are_moved_for_all_groups_of_heads(batch):
    rows = random(*batch, 1, 128)
    function = lambda row: side_by_side.columns_of(row, 2)
    found = functools.reduce(lambda f, _: jax.vmap(f), batch, function)(rows)
    np.testing.assert_array_equal(
        found, jnp.stack([function(row) for row in rows.reshape(-1, 1, 128)]).reshape(found.shape)
    )


@pytest.mark.parametrize(("heads", "size", "width", "_"), CASES)
def test_a_row_of_each_head_fills_its_lanes(heads, size, width, _):
    rows = random(heads, size)
    found = side_by_side.spread(rows, heads, width)
    assert found.shape == (size, heads * width if heads > 1 else 1)
    for head in range(heads):
        lanes = found[:, head * width : (head + 1) * width] if heads > 1 else found
        np.testing.assert_array_equal(lanes, jnp.broadcast_to(rows[head][:, None], lanes.shape))


@pytest.mark.parametrize(("count", "together"), [(2, 2), (4, 2), (3, 1)])
def test_heads_lie_beside_each_other_where_they_fill_a_tile(count, together):
    """A function of groups is that of each head; columns lie in all lanes of their head."""
    size = 64
    seen = []

    def function(heads, x, column):
        seen.append(heads)
        assert x.shape == (size, heads * size)
        return side_by_side.times(x, x, heads) * column, side_by_side.weighted(x, column, heads)

    x, column = random(count, size, size), random(count, size, 1)
    matrix, found = side_by_side.beside(function, size, x, column)
    assert seen == [together]
    np.testing.assert_allclose(matrix, x @ x * column, atol=1e-3)
    np.testing.assert_allclose(found[..., :1], x @ column, atol=1e-3)
