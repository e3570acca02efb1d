"""Mesa memories: both solvers against the definition, against the regression in NumPy, and where the steps do not converge."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from tests.marks import some_slow
from tests.memory.cases import assert_close, check_every_split_and_read, graded, objective, slice_time

TIME, PIECE = 75, 5  # more than a chunk of either solver, and no multiple
CASES = {"conjugate_gradient": rules.mesa(), "exact": rules.mesa("exact")}
IDS = jnp.asarray(np.stack([np.repeat([0, 1, 2, 5], [10, 7, 50, 8]), np.repeat([3, 4], [64, 11])]))
each = pytest.mark.parametrize("name", CASES)


def make_inputs(*, time=TIME, key_dim=4, value_dim=3, dtype=jnp.float64, **gates):
    rng = np.random.default_rng(0)
    wide = jnp.promote_types(dtype, jnp.float32)
    sizes = {"num_heads": 2, "key_dim": key_dim, "value_dim": value_dim}
    params = memory.init_params(rules.mesa(), jax.random.key(0), **sizes)
    params = jax.tree.map(lambda x: jnp.asarray(x + 0.3 * rng.standard_normal(x.shape), wide), params)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v = (rng.standard_normal((2, time, 2, dim)) for dim in (key_dim, key_dim, value_dim))
    drawn = {"retention": rng.uniform(0.8, 1.0, (2, time, 2)), "step_size": rng.uniform(0.0, 1.0, (2, time, 2))}
    drawn |= {name: np.full((2, time, 2), value) for name, value in gates.items()}
    q, k, v = (jnp.asarray(x, dtype) for x in (unit(q), unit(k), v))
    return params, q, k, v, memory.Gates(**{name: jnp.asarray(x, wide) for name, x in drawn.items()})


def solved(ridge, k, v, beta, start=0.0):
    """The W that minimizes Σ β ‖W k − v‖² + Σ_j λ_j ‖W_j − start_j‖², in NumPy."""
    return ((v.T * beta) @ k + start * ridge) @ np.linalg.inv((k.T * beta) @ k + np.diag(ridge))


def ridge_of(params):
    return 0.25 + np.log1p(np.exp(np.asarray(params.ridge)))


@each
@pytest.mark.parametrize("packed", some_slow([False, True], [False]))
def test_values_and_gradients(name, packed, x64):
    rule, args = CASES[name], make_inputs()
    ids = {"segment_ids": IDS} if packed else {}
    (_, values), gradients = graded(memory.scan, rule, *args, **ids, max_segments=4 if packed else None)
    (_, expected), expected_gradients = graded(memory.reference, rule, *args, **ids)
    assert_close(values, expected, 1e-12)
    assert_close(gradients, expected_gradients, 1e-10)


@each
def test_every_split(name, x64):
    """A call of one token, a read, and a call of several from every state: those of one call."""
    rule, (params, *tokens) = CASES[name], make_inputs(time=23)
    check_every_split_and_read(rule, params, tokens, PIECE, 1e-12)


def test_a_packed_row_continues_and_is_its_segments(x64):
    rule, (params, *tokens) = CASES["conjugate_gradient"], make_inputs()
    whole, end = memory.scan(rule, params, None, *tokens, segment_ids=IDS, max_segments=4)
    alone, _ = memory.scan(rule, params, None, *slice_time(tuple(tokens), 17, 67))
    assert_close(whole[:1, 17:67], alone[:1], 1e-12)
    first, state = memory.scan(
        rule, params, None, *slice_time(tuple(tokens), 0, 13), segment_ids=IDS[:, :13], max_segments=4
    )
    rest = memory.scan(
        rule, params, state, *slice_time(tuple(tokens), 13, TIME), segment_ids=IDS[:, 13:], max_segments=4
    )
    assert_close((jnp.concatenate([first, rest[0]], axis=1), rest[1]), (whole, end), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 8e-3)])
def test_solvers_agree(dtype, tolerance):
    """With α, β and λ as models have them."""
    args = make_inputs(key_dim=32, value_dim=32, dtype=jnp.dtype(dtype))
    expected = memory.reference(CASES["exact"], args[0], None, *args[1:])
    for rule in CASES.values():
        y, state = memory.scan(rule, args[0], None, *args[1:])
        assert (y.dtype, state.key_sums.dtype) == (dtype, jnp.float32)
        assert_close((y.astype(jnp.float32), state), (expected[0].astype(jnp.float32), expected[1]), tolerance)


def test_gradients_by_steps_are_those_of_the_exact_form():
    args = make_inputs(key_dim=32, value_dim=32, dtype=jnp.float32)
    by_steps, exact = (graded(memory.scan, CASES[name], *args)[1] for name in ("conjugate_gradient", "exact"))
    assert_close(by_steps, exact, 1e-5)


ZEROS = [{"retention": 0.0}, {"step_size": 0.0}, {"retention": 0.0, "step_size": 0.0}]


@pytest.mark.parametrize("name", some_slow(CASES, ["exact"]))
def test_gates_of_zero(name, x64):
    """Values and derivatives. Where nothing is written, one step solves, and the others must not divide 0 by 0."""
    run = lambda fn: lambda *args: objective(fn, CASES[name], *args)[0]
    scan, reference = (
        jax.jit(jax.value_and_grad(run(fn), argnums=(0, 1, 2, 3, 4))) for fn in (memory.scan, memory.reference)
    )
    for gates in ZEROS:
        args = make_inputs(**gates)
        assert_close(scan(*args), reference(*args), 1e-10, str(gates))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(scan(args[0], 0 * args[1], *args[2:])))


@each
def test_the_read_is_the_ridge_regression_over_all_tokens(name, x64):
    """With α = β = 1, at every token; the last row of Table 1."""
    params, q, k, v, gates = make_inputs(time=20, retention=1.0, step_size=1.0)
    y, _ = memory.scan(CASES[name], params, None, q, k, v, gates)
    row, head, ridge = 1, 0, ridge_of(params)[0]
    one = lambda x: np.asarray(x)[row, :, head]
    start = np.asarray(params.weights["W"])[head]
    for t in range(20):
        W = solved(ridge, one(k)[: t + 1], one(v)[: t + 1], np.ones(t + 1), start)
        np.testing.assert_allclose(one(y)[t], W @ one(q)[t], rtol=1e-10)


def test_no_other_rule_has_a_smaller_loss(x64):
    """Σ ‖W k − v‖² + λ ‖W‖² of the matrix that each rule ends with. One step on each token is no minimum of the sum over all."""
    params, _, k, v, gates = make_inputs(time=20, retention=1.0, step_size=1.0)
    params = params._replace(weights=jax.tree.map(jnp.zeros_like, params.weights))
    ridge, k_, v_ = ridge_of(params)[0], np.asarray(k)[0, :, 0], np.asarray(v)[0, :, 0]
    loss = lambda W: ((k_ @ W.T - v_) ** 2).sum() + (ridge * W**2).sum()
    _, state = memory.scan(CASES["conjugate_gradient"], params, None, k, k, v, gates)
    identity = jnp.broadcast_to(jnp.eye(4)[None, :, None], (2, 4, 2, 4))
    W = np.asarray(memory.read(CASES["conjugate_gradient"], params, state, identity))[0, :, 0].T
    np.testing.assert_allclose(W, solved(ridge, k_, v_, np.ones(20)), rtol=1e-10)
    slope = 2 * (W @ k_.T - v_.T) @ k_ + 2 * ridge * W
    assert np.abs(slope).max() < 1e-10
    for other in (rules.linear_attention(), rules.delta_rule()):
        start = memory.MemoryParams({"W": jnp.zeros((2, 3, 4))}, None, None)
        _, after = memory.scan(other, start, None, k, k, v, memory.Gates(step_size=gates.step_size))
        assert loss(np.asarray(after.memory["W"])[0, 0]) > 1.5 * loss(W)


@pytest.mark.parametrize(
    ("condition", "least", "most"), [(10, 0, 2e-6), (30, 1e-6, 1e-4), (100, 5e-4, 2e-2), (1e4, 0.1, 100)]
)
def test_where_thirty_steps_converge(condition, least, most):
    """The residuals that the docstring of `MesaRule` states, for eigenvalues at equal ratios. "exact" solves all of them."""
    dim, rng = 64, np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    H = (basis * (np.geomspace(1, condition, dim) - 1)) @ basis.T
    q = rng.standard_normal((1, 32, 1, dim))
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    state = memory.MesaState(jnp.asarray(H[None, None], jnp.float32), jnp.eye(dim)[None, None], jnp.full(1, -1))
    params = memory.init_params(rules.mesa(), jax.random.key(0), num_heads=1, key_dim=dim, value_dim=dim)
    for rule, low, high in [
        (rules.mesa(), least, most),
        (rules.mesa("exact"), 0, 1e-4),
        (rules.mesa(steps=1000), 0, 1e-3),
    ]:
        x = np.asarray(memory.read(rule, params, state, jnp.asarray(q, jnp.float32)), np.float64)
        residual = np.linalg.norm(x @ (H + np.eye(dim)) - q, axis=-1).max()
        assert low <= residual <= high, (rule, residual)
        eighth = memory.read(rule, params, state, jnp.asarray(q / 8, jnp.float32))
        np.testing.assert_array_equal(8 * np.asarray(eighth), x)  # linear in q, and not only where it has converged


def test_inside_wrapped_rules(x64):
    params, *tokens = make_inputs(time=17, value_dim=4)
    u = jnp.asarray(np.random.default_rng(1).standard_normal(tokens[0].shape))
    cached = memory.CachedRule(CASES["conjugate_gradient"], "grm", segment_size=5)
    args = (params, None, *tokens[:3], tokens[3]._replace(connector=u))
    assert_close(memory.scan(cached, *args)[0], memory.reference(cached, *args)[0], 1e-11)
    tree = memory.LogLinearRule(CASES["exact"], segment_size=5, levels=2)
    args = (params, None, *tokens[:3], tokens[3]._replace(connector=u[..., :3]))
    assert_close(memory.scan(tree, *args)[0], memory.reference(tree, *args)[0], 1e-11)


def test_states_in_files_and_gates(tmp_path):
    rule, (params, *tokens) = CASES["conjugate_gradient"], make_inputs(dtype=jnp.float32)
    _, state = memory.scan(rule, params, None, *tokens)
    memory.save(rule, params, state, tmp_path / "state.safetensors")
    back = memory.load(rule, params, tmp_path / "state.safetensors")
    assert all(np.array_equal(a, b) for a, b in zip(back, state, strict=True))
    with pytest.raises(ValueError, match="was saved with another memory"):
        memory.load(CASES["exact"], params, tmp_path / "state.safetensors")
    gates = memory.suggested_gates(rule, batch_size=2, time=3, num_heads=2, key_dim=4)
    assert gates.retention.shape == gates.step_size.shape == (2, 3, 2)
    assert (gates.step_size == 0.5).all()
    fresh = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=3)
    np.testing.assert_allclose(ridge_of(fresh), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "solver must be .*got 'cg'": lambda *_: rules.mesa("cg"),
        "steps must be an integer ≥ 1, got 0": lambda *_: rules.mesa(steps=0),
        "floor must be a number > 0, got 0": lambda *_: rules.mesa(floor=0),
        r"params.ridge has shape \(2, 3\), must be \[2, 4\]": lambda run, params: run(
            params._replace(ridge=params.ridge[:, 1:])
        ),
        "params must be MesaParams with weights": lambda run, params: run(params.ridge),
    }.items(),
)
def test_refused(message, call):
    params, *tokens = make_inputs(time=3, dtype=jnp.float32)
    with pytest.raises((ValueError, TypeError), match=message):
        call(lambda params: memory.scan(rules.mesa(), params, None, *tokens), params)
    assert dataclasses.replace(rules.mesa(), solver="exact") == CASES["exact"]
