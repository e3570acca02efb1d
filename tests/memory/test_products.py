"""`products.product` against jax's own products, and what it is for: derivatives without transposes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.flops import count_flops
from atlasjax.memory.products import dense, product
from tests.comparisons import close
from tests.marks import if_slow, some_slow

FORMS = {"nn": "ta,ab->tb", "nt": "ta,ba->tb", "tn": "ta,tb->ab"}
SHAPES = {"nn": ((3, 5), (5, 4)), "nt": ((3, 5), (4, 5)), "tn": ((3, 5), (3, 4))}
each_form = pytest.mark.parametrize("form", FORMS)


def arrays(form, dtype, *lead):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((*lead, *shape)), dtype) for shape in SHAPES[form])


def own(form, dtype=jnp.float32):
    return functools.partial(product, form=form, dtype=dtype)


def jaxs(form, dtype=jnp.float32):
    return functools.partial(jnp.einsum, FORMS[form], preferred_element_type=dtype)


def derivatives(f, x, y, over):
    """Value, gradients, a forward derivative, and a gradient of a gradient, each of f mapped by `over`."""
    f = over(f)
    loss = lambda x, y: jnp.sum(f(x, y).astype(jnp.float32) ** 3)
    slopes = jax.grad(loss, argnums=(0, 1))
    again = jax.grad(lambda x, y: sum(jnp.sum(s.astype(jnp.float32) ** 2) for s in slopes(x, y)), argnums=(0, 1))
    return f(x, y), slopes(x, y), jax.jvp(f, (x, y), (y.mean() * x, x.mean() * y))[1], again(x, y)


@each_form
@pytest.mark.parametrize(
    ("lead", "dtype"),
    [
        ((), jnp.float32), ((2, 3), jnp.float32), ((2,), jnp.bfloat16),
        if_slow((2,), jnp.float32), if_slow((), jnp.bfloat16), if_slow((2, 3), jnp.bfloat16),
    ],
)  # fmt: skip
def test_values_and_derivatives(form, dtype, lead):
    x, y = arrays(form, dtype, *lead)
    over = lambda f: functools.reduce(lambda f, _: jax.vmap(f), lead, f)
    for a, b in zip(*(jax.tree.leaves(derivatives(f(form), x, y, over)) for f in (own, jaxs)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(jnp.abs(b).max()))


@each_form
@pytest.mark.parametrize("axes", some_slow([(0, None), (None, 0), (1, 2), (2, 0)], [(1, 2)]))
def test_mapped_axes(form, axes):
    """An axis anywhere, and a factor that serves the whole batch."""
    x, y = (
        jnp.moveaxis(z, 0, axis) if axis is not None else z[0]
        for z, axis in zip(arrays(form, jnp.float32, 2), axes, strict=True)
    )
    over = lambda f: jax.vmap(f, in_axes=axes)
    close(*(derivatives(f(form), x, y, over) for f in (own, jaxs)), 1e-6)


@each_form
def test_gradients_of_a_batch_have_no_transposes(form):
    gradients = lambda f: str(
        jax.make_jaxpr(jax.vmap(lambda x, y, d: jax.vjp(f, x, y)[1](d)))(
            *arrays(form, jnp.float32, 2), jax.vmap(jaxs(form))(*arrays(form, jnp.float32, 2))
        )
    )
    assert "transpose" not in gradients(own(form))
    # jax's own have one, except of x yᵀ.
    assert ("transpose[" in gradients(jaxs(form))) == (form != "nt")


@each_form
def test_operations_are_counted(form):
    x, y = arrays(form, jnp.float32, 2)
    gradients = lambda f: jax.grad(lambda x, y: jax.vmap(f)(x, y).sum(), argnums=(0, 1))
    assert count_flops(gradients(own(form)), x, y) == count_flops(gradients(jaxs(form)), x, y) == 3 * 2 * 2 * 3 * 4 * 5


def test_precision_is_kept():
    x, y = arrays("nn", jnp.float32)
    f = lambda x, y: product(x, y, "nn", jnp.float32, jax.lax.Precision.HIGHEST).sum()
    program = jax.jit(jax.grad(f, argnums=(0, 1))).lower(x, y).as_text()
    assert program.count("dot_general") == program.count("precision = [HIGHEST, HIGHEST]") == 2


def _tensordot(dtype=None, precision=None):
    return lambda x, y: jnp.tensordot(x, y, axes=1, precision=precision, preferred_element_type=dtype)


DENSE = list(itertools.product([(4,), (2, 4), ()], [(), (7,), (2, 3)], [jnp.float32, jnp.bfloat16]))
# Every shape of outputs with every shape of tokens would compile the same three products nine times.
BY_DEFAULT = [
    ((4,), (), jnp.float32), ((2, 4), (2, 3), jnp.float32), ((), (7,), jnp.float32),
    ((2, 4), (7,), jnp.bfloat16), ((), (2, 3), jnp.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("out", "lead", "dtype"), [case if case in BY_DEFAULT else if_slow(*case) for case in DENSE])
def test_dense_and_its_derivatives(dtype, lead, out):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((*lead, 5), (5, *out)))
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    for result in (None, jnp.float32):
        f = lambda x, y, result=result: dense(x, y, result)
        found, expected = (derivatives(g, x, kernel, lambda f: f) for g in (f, _tensordot(result)))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            close(a, b, tolerance)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 2), (2, 0)])
def test_dense_over_mapped_axes(axes):
    rng = np.random.default_rng(1)
    x, kernel = (
        jnp.asarray(np.moveaxis(z, 0, axis) if axis is not None else z[0], jnp.float32)
        for z, axis in zip((rng.standard_normal((3, 4, 6, 5)), rng.standard_normal((3, 5, 2, 4))), axes, strict=True)
    )
    over = lambda f: jax.vmap(f, in_axes=axes)
    close(*(derivatives(f, x, kernel, over) for f in (dense, _tensordot())), 1e-6)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_dense_of_16_bit_tokens_reads_a_float32_kernel_as_it_is_on_a_cpu(lead):
    rng = np.random.default_rng(2)
    x, kernel = jnp.asarray(rng.standard_normal((*lead, 4, 5)), jnp.bfloat16), jnp.asarray(rng.standard_normal((5, 6)))
    kernel = kernel.astype(jnp.float32)
    f = jax.jit((jax.vmap(dense, in_axes=(0, None, None)) if lead else dense), static_argnums=2)
    exact = np.asarray(x, np.float32) @ np.asarray(kernel)
    np.testing.assert_allclose(f(x, kernel, jnp.float32), exact, rtol=0, atol=1e-6 * np.abs(exact).max())
    assert f(x, kernel, jnp.bfloat16).dtype == jnp.bfloat16
    program = f.lower(x, kernel, jnp.bfloat16).as_text()
    assert "tensor<5x6xbf16>" not in program
    assert "tensor<5x6xbf16>" in f.trace(x, kernel, jnp.bfloat16).lower(lowering_platforms=("tpu",)).as_text()
    by_x, by_kernel = jax.grad(lambda x, y: dense(x, y, jnp.float32).sum(), argnums=(0, 1))(x, kernel)
    assert (by_x.dtype, by_kernel.dtype) == (jnp.bfloat16, jnp.float32)
    rows = np.asarray(x, np.float32).reshape(-1, 5).sum(axis=0)
    np.testing.assert_allclose(
        by_kernel, np.broadcast_to(rows[:, None], (5, 6)), rtol=0, atol=2e-2 * np.abs(rows).max()
    )


def test_the_derivative_by_a_kernel_copies_no_token_in_transposed_order():
    """What `dense` is for. jax's own derivative has a copy with 24 outputs as rows, and the 64 tokens as columns."""
    x, kernel = jnp.ones((4, 16, 8)), jnp.ones((8, 24))
    slope = lambda f: jax.jit(jax.grad(lambda x, y: jnp.sum(jax.nn.silu(f(x, y))), (0, 1))).lower(x, kernel)
    assert "f32[24,64]" in slope(_tensordot()).compile().as_text()
    assert "f32[24,64]" not in slope(dense).compile().as_text()


def test_precision_and_operations_of_dense():
    highest, x, kernel = jax.lax.Precision.HIGHEST, jnp.ones((4, 16, 8)), jnp.ones((8, 24))
    slopes = lambda f: jax.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))
    program = jax.jit(slopes(lambda x, y: dense(x, y, precision=highest))).lower(x, kernel).as_text()
    assert program.count("dot_general") == program.count("precision = [HIGHEST, HIGHEST]") == 2
    assert count_flops(slopes(dense), x, kernel) == count_flops(slopes(_tensordot()), x, kernel) == 3 * 2 * 64 * 8 * 24


@pytest.mark.parametrize("name", ["titans_no_momentum", "linear_attention", "gated_delta_rule"])
def test_float16_where_what_a_memory_computes_does_not_fit(name):
    """Memories and inner gradients exceed the maximum of float16, 65504; tokens and outputs do not."""
    make = rules.REGISTRY[name]
    rule = make(chunk_size=8) if name == "titans_no_momentum" else make()
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=4, value_dim=4)
    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 24, 1, 4))
    if name == "linear_attention":  # equal keys add up
        k = jnp.broadcast_to(k[:, :1], k.shape)
        q, v = k / 16, jnp.abs(v)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v = (x.astype(jnp.float16) for x in (q if name == "linear_attention" else unit(q), unit(k), v * 8e3))
    gates = memory.suggested_gates(rule, batch_size=1, time=24, num_heads=1, key_dim=4)

    @jax.jit
    def run(q, k, v):
        whole = memory.scan(rule, params, None, q, k, v, gates)
        cut = lambda which: jax.tree.map(lambda x: x[:, which], (q, k, v, gates))
        _, state = memory.scan(rule, params, None, *cut(slice(-1)))
        return whole, memory.step(rule, params, state, *cut(-1))

    (y, _), (last, _) = run(q, k, v)
    expected, state = memory.reference(rule, params, None, *(x.astype(jnp.float32) for x in (q, k, v)), gates)
    size = float(jnp.abs(expected).max())
    assert size < 65504
    if name == "linear_attention":
        assert max(float(jnp.abs(w).max()) for w in state.memory.values()) > 65504
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=4e-3 * size)
    np.testing.assert_allclose(np.asarray(last, np.float32), expected[:, -1], atol=4e-3 * size)
