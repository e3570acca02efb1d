"""Products of sorted rows with their groups' matrices, in tiles, against one product for each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.nn.grouped_products import grouped_product, in_tiles

# name → (rows, sizes of the groups): with tiles of 128 rows.
CASES = {
    "groups across tiles": (300, [0, 100, 3, 0, 150, 7]),
    "fewer rows than groups": (5, [0, 1, 0, 2, 0, 0, 1]),
    "groups that fill tiles": (256, [128, 128]),
    "one group": (130, [130]),
    "a row after a tile": (257, [1, 255, 1]),
    "one row": (1, [0, 1]),
}


def inputs(name, dtype):
    rows, sizes = CASES[name]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return draw(rows, 6), draw(len(sizes), 6, 9), jnp.asarray(sizes, jnp.int32), draw(rows, 9)


def definition(x, w, sizes, d):
    """(y, Σ y d, the gradients of that by x and w) of the rows that have a group."""
    group = np.repeat(np.arange(len(sizes)), np.asarray(sizes))
    n = len(group)
    x, w, d = (np.asarray(a, np.float64) for a in (x, w, d))
    y, by_x, by_w = np.zeros((len(x), w.shape[2])), np.zeros_like(x), np.zeros_like(w)
    for r in range(n):
        y[r] = x[r] @ w[group[r]]
        by_x[r] = w[group[r]] @ d[r]
        by_w[group[r]] += np.outer(x[r], d[r])
    return y, by_x, by_w


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_tiles_are_the_products_of_rows(name, dtype, bound):
    x, w, sizes, d = inputs(name, dtype)
    d = jnp.where(jnp.arange(len(d))[:, None] < sizes.sum(), d, 0)
    y, back = jax.vjp(lambda x, w: in_tiles(x, w, sizes), x, w)
    assert y.dtype == dtype
    for found, expected in zip((y, *back(d)), definition(x, w, sizes, d), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=bound * np.abs(expected).max())


def test_a_group_without_rows_has_no_gradient():
    x, w, sizes, d = inputs("groups across tiles", jnp.float32)
    by_w = jax.grad(lambda w: jnp.sum(in_tiles(x, w, sizes) * d))(w)
    assert not np.asarray(by_w)[np.asarray(sizes) == 0].any()


def test_no_group_has_rows():
    x, w, sizes, d = inputs("groups across tiles", jnp.float32)
    y, back = jax.vjp(lambda x, w: in_tiles(x, w, 0 * sizes), x, w)
    assert not any(np.asarray(a).any() for a in (y, *back(d)))


def test_each_platform_has_its_product():
    """A program for a TPU has the ragged product, and one for a CPU or a GPU does not: there all groups would meet all rows."""
    x, w, sizes, _ = inputs("groups across tiles", jnp.float32)
    traced = jax.jit(grouped_product).trace(x, w, sizes)
    programs = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cpu", "cuda")}
    assert {name: "ragged_dot" in text for name, text in programs.items()} == {"tpu": True, "cpu": False, "cuda": False}
