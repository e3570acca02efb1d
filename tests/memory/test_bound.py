"""The bound (SEMANTICS 1.12): what it promises, where it changes nothing, and that every engine has it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from atlasjax import memory, rules
from atlasjax.memory import Bound, bounds, call_checks, features, objectives, optimizers, retention, structures
from atlasjax.memory.blocks import largest_entry
from atlasjax.memory.fast_weights.rule import MemoryRule
from tests.marks import if_slow, some_slow
from tests.memory.cases import RULES, assert_close, graded, make_inputs, slice_time

RELU = structures.MLP(expansion=2, activation="relu")
MATRIX, GD = structures.Matrix(), optimizers.GradientDescent()


def similar(k, spread):
    k = k[:, :1] + spread * k
    return k / jnp.linalg.norm(k, axis=-1, keepdims=True)


def bold(rule, dtype=jnp.float64, time=37, spread=0.3, step_size=1.0, **overrides):
    """Inputs at which the papers' recurrence diverges: keys that are alike, large steps, and momentum that never fades."""
    params, q, k, v, gates = make_inputs(rule, dtype=dtype, time=time, step_size=step_size, **overrides)
    if gates.momentum_decay is not None:
        gates = gates._replace(momentum_decay=jnp.where(gates.momentum_decay > 0.6, 1.0, gates.momentum_decay))
    return params, q, similar(k, spread), v, gates


@pytest.mark.parametrize(
    ("structure", "forgets"),
    [
        (MATRIX, retention.Full()), (RELU, retention.Full()),
        if_slow(structures.MLP(depth=3, expansion=1, activation="relu"), retention.Full()), (MATRIX, retention.Lq(4.0)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("window", [1, 3])
def test_squared_norms_grow_by_no_more_than_the_steps_times_the_squared_targets(structure, forgets, window, x64):
    """The inequality of SEMANTICS 1.12, for every weight and at every token; keys that are the same, alike, and large."""
    rule = MemoryRule(
        structure, objectives.L2(), optimizer=GD, retention=forgets, window=window, chunk_size=16,
        bound=Bound(weight_norm=None),
    )  # fmt: skip
    q = getattr(forgets, "q", 2.0)
    square = lambda weights: {n: jnp.sum(jnp.abs(w) ** q, axis=(-2, -1)) ** (2 / q) for n, w in weights.items()}

    @jax.jit
    def steps(params, k, v, gates):
        """The squared norms of the weights at the start, and after every token."""
        state = memory.init_state(rule, params, batch_size=2)

        def step(state, token):
            _, state = memory.step(rule, params, state, token[0], *token)
            return state, square(state.memory)

        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (k, v, gates))
        return square(state.memory), jax.lax.scan(step, state, tokens)[1]

    for spread in (0.0, 0.3, 1e3):
        params, _, k, v, gates = bold(rule, time=48, spread=spread, step_size=5.0, retention=1.0)
        if spread > 1:
            k = 1e4 * k
        residual = k if structure.residual else 0.0
        target = jnp.sum((v - residual) ** 2, -1) + 1e-4 * jnp.sum(v * v, -1)  # [batch, time, heads]
        if window > 1:
            last = jnp.stack([jnp.pad(target, ((0, 0), (j, 0), (0, 0)))[:, : k.shape[1]] for j in range(window)], -1)
            target = jnp.sum(gates.window_weights * last, -1)
        allowed = jnp.moveaxis(jnp.cumsum(gates.step_size * target, axis=1), 1, 0)
        start, norms = steps(params, k, v, gates)
        for name, norm in norms.items():
            assert norm.shape == allowed.shape
            assert (norm <= (start[name] + allowed) * (1 + 1e-9)).all(), (name, spread)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1e3])
@pytest.mark.parametrize("horizon", [1.5, 4.0, 64.0])
def test_squared_norms_with_momentum_and_any_decays(horizon, spread, x64):
    """The inequality of SEMANTICS 1.12 for the larger of ‖M‖² and ‖M + (H − 1) S‖², with decays from 0 to 1 at random."""
    bound = Bound(horizon=horizon, weight_norm=None, slope=None)
    rule = MemoryRule(MATRIX, objectives.L2(), optimizer=optimizers.Momentum(), chunk_size=16, bound=bound)
    params, _, k, v, gates = bold(rule, time=160, spread=spread, step_size=1.0, retention=1.0)
    rng = np.random.default_rng(0)
    decays = rng.choice([0.0, 0.05, 0.5, 1.0], gates.momentum_decay.shape, p=[0.05, 0.05, 0.1, 0.8])
    sizes = rng.choice([0.0, 1e-3, 1.0], gates.step_size.shape, p=[0.6, 0.2, 0.2])
    gates = gates._replace(momentum_decay=jnp.asarray(decays), step_size=jnp.asarray(sizes))
    square = lambda w: jnp.sum(w["W"] ** 2, axis=(-2, -1))

    def step(state, token):
        _, state = memory.step(rule, params, state, token[0], *token)
        ahead = jax.tree.map(lambda w, s: w + (horizon - 1) * s, state.memory, state.momentum)
        return state, jnp.maximum(square(state.memory), square(ahead))

    state = memory.init_state(rule, params, batch_size=2)
    _, norms = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (k, v, gates)))
    share = jnp.minimum(
        horizon * gates.step_size, 1.0 / jnp.sum(k * k, -1)
    )  # H η̄: a token steps at most onto its target
    allowed = jnp.cumsum(share * jnp.sum(v * v, -1) * (1 + 1e-4), axis=1)
    assert (norms <= (square(state.memory) + jnp.moveaxis(allowed, 1, 0)) * (1 + 1e-9)).all()


@pytest.mark.parametrize("structure", [MATRIX, structures.MLP(), if_slow(structures.GatedMLP())], ids=str)
def test_momentum_does_not_repeat_a_full_step(structure):
    """A few tokens with a small θ and large steps between tokens with θ = 1 and almost none. A limit by each token's own θ does
    not hold: the memories ended at 66,060, 1,154 and 1,564."""
    rule = dataclasses.replace(rules.titans(), structure=structure)
    params, _, k, v, gates = make_inputs(rule, batch=1, heads=1, time=2048, key_dim=16, value_dim=16)
    k = similar(k, 1.0)
    v = 20.0 * v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    rare = jnp.asarray(np.random.default_rng(0).uniform(size=gates.step_size.shape) < 0.03)
    gates = memory.Gates(
        retention=jnp.ones_like(gates.retention), step_size=jnp.where(rare, 1.0, 1e-6),
        momentum_decay=jnp.where(rare, 0.05, 1.0),
    )  # fmt: skip
    y, state = memory.scan(rule, params, None, k, k, v, gates)
    assert rule.weight_norm(state).max() < 20.0
    assert jnp.abs(y).max() < 1000.0  # values have length 20, and a gated MLP is of degree three; it was 10¹⁰
    _, state = memory.scan(rule.unbounded(), params, None, k, k, v, gates)
    assert not rule.weight_norm(state).max() < 200.0


def test_a_memory_that_diverges_without_the_bound_learns_with_it():
    """A user's first call: unit keys, a step size of 0.37."""
    rule = rules.titans()
    params, _, k, _, gates = make_inputs(rule, time=2048, step_size=0.37, retention=1.0, key_dim=16, value_dim=16)
    v = jnp.roll(k, 1, axis=-1)  # one map of the key
    y, state = memory.scan(rule, params, None, k, k, v, gates)
    error = jnp.sum((y - v) ** 2, -1)
    assert error[:, -64:].mean() < 0.2
    assert not jnp.isfinite(memory.scan(rule.unbounded(), params, None, k, k, v, gates)[0]).all()
    assert all(jnp.isfinite(w).all() for w in jax.tree.leaves(state.memory))


BOLD = {
    "titans": {}, "omeganet_window_over_chunk": {}, "moneta": {}, "channel_delta_momentum": {},
    "channel_steps_chunk8": {"step_size": 3.0}, "rwkv7": {"removal": 3.0}, "gdn2": {"step_size": 9.0},
    "gated_delta_rule": {"step_size": 4.0},
}  # fmt: skip


def test_a_delta_rule_steps_no_further_than_a_reflection_along_its_read_key(x64):
    """With η rᵀk above 2 the token's error is turned around; with rᵀk < 0 nothing is removed, and the value is written."""
    r, k, v = jnp.array([1.0, 2.0]), jnp.array([0.5, 1.0]), jnp.array([3.0, -1.0])
    params = memory.MemoryParams({"W": jnp.array([[[0.3, 0.1], [-0.2, 0.4]]])}, None, None)
    W = np.asarray(params.weights["W"][0])
    token = lambda x: x[None, None, None]

    def written(eta, read_key):
        gates = memory.Gates(retention=jnp.ones(1), step_size=jnp.array([eta]), removal_key=token(read_key))
        _, state = memory.scan(rules.pgdn(), params, None, token(k), token(k), token(v), gates)
        return state.memory["W"][0, 0]

    error = v - W @ r
    assert_close(written(0.3, r), W + 0.3 * np.outer(error, k), 1e-12)
    assert_close(v - written(100.0, r) @ r, -error, 1e-12)  # rᵀk = 2.5, so η = 0.8
    assert_close(written(0.7, -r), W + 0.7 * np.outer(v, k), 1e-12)


def test_keys_that_are_not_parallel_need_a_decay(x64):
    """SEMANTICS 3.3: every transition has eigenvalues in [0, 1], and Gated DeltaNet-2's memory grows by (1 − c²)/c² in a round."""
    c, rounds, tokens = 0.3, 4, 100
    s = np.sqrt(1 - c * c)
    one = np.concatenate([np.tile([c, -s], (tokens, 1)), np.tile([s, -c], (tokens, 1))])
    erase = np.concatenate([np.tile([1.0, 0.0], (tokens, 1)), np.tile([0.0, 1.0], (tokens, 1))])
    lay = lambda x: jnp.asarray(np.tile(x, (rounds, 1)))[None, :, None]
    params = memory.MemoryParams({"W": jnp.eye(2)[None]}, None, None)

    def largest(alpha):
        gates = memory.Gates(retention=jnp.full(2, alpha), step_size=jnp.ones(1), removal_key=lay(erase * one))
        k = lay(one)
        _, state = memory.scan(rules.gdn2(), params, None, k, k, 0.0 * k, gates)
        return jnp.abs(state.memory["W"]).max()

    assert_close(largest(1.0), jnp.asarray(((1 - c * c) / c**2) ** rounds), 1e-3)
    assert largest(0.95) < 1


@pytest.mark.parametrize(
    "name", some_slow(BOLD, ["titans", "moneta", "omeganet_window_over_chunk", "channel_steps_chunk8"])
)
def test_the_engine_is_the_reference_where_the_bound_acts(name, x64):
    rule = RULES[name]
    params, *rest = bold(rule, **({"step_size": 1.0} | BOLD[name]))
    expected = graded(memory.reference, rule, params, *rest)
    assert_close(graded(memory.scan, rule, params, *rest), expected, 1e-8)
    different, _ = memory.reference(rule.unbounded(), params, None, *rest)
    assert not jnp.abs(different - expected[0][1][0]).max() < 1e-3  # it acts


@pytest.mark.parametrize(
    "name",
    some_slow(
        ["titans", "omeganet_window_over_chunk", "titans_at_its_limits", "channel_delta_momentum"],
        ["titans", "titans_at_its_limits", "channel_delta_momentum"],
    ),
)
def test_streaming_where_the_bound_acts(name, x64):
    rule = RULES[name]
    params, *rest = bold(rule, time=17)
    expected, _ = memory.scan(rule, params, None, *rest)
    scan = jax.jit(lambda state, *args: memory.scan(rule, params, state, *args))
    for cut in (1, 16):  # two shapes; in and at the end of a chunk
        first, state = scan(memory.init_state(rule, params, batch_size=2), *slice_time(rest, 0, cut))
        second, _ = scan(state, *slice_time(rest, cut, 17))
        assert_close(jnp.concatenate([first, second], axis=1), expected, 1e-9, what=str(cut))


def test_packed_segments_where_the_bound_acts(x64):
    rule = dataclasses.replace(RULES["titans_at_its_limits"], structure=MATRIX)
    params, *rest = bold(rule, time=30)
    ids = jnp.asarray([[0] * 11 + [1] * 19, [4] * 30])
    packed, _ = memory.scan(rule, params, None, *rest, segment_ids=ids, max_segments=2)
    alone, _ = memory.scan(rule, params, None, *slice_time(rest, 11, 30))
    assert_close(packed[0, 11:], alone[0], 1e-9)
    assert_close(packed, memory.reference(rule, params, None, *rest, segment_ids=ids)[0], 1e-9)


@pytest.mark.parametrize("name", some_slow(["titans", "muon_matrix_channel"], ["titans"]))
def test_a_fresh_call_of_one_chunk_begins_within_the_bound(name, x64):
    """Such a call begins one memory for all rows; a learned start may be larger than the bound."""
    rule = dataclasses.replace(RULES[name], chunk_size=16, bound=Bound(weight_norm=0.1))
    params, *rest = bold(rule, time=16)
    norm = lambda w: jnp.linalg.norm(w, axis=(-2, -1)) / w.shape[-2] ** 0.5
    assert any((norm(w) > 0.1).any() for w in params.weights.values())
    found, expected = (graded(fn, rule, params, *rest) for fn in (memory.scan, memory.reference))
    assert_close(found, expected, 1e-8)


def test_online_rules_are_the_papers_while_their_steps_are_safe(x64):
    rule = rules.titans_no_momentum(1)
    params, *rest = make_inputs(rule, dtype=jnp.float64)
    assert_close(memory.scan(rule, params, None, *rest), memory.scan(rule.unbounded(), params, None, *rest), 1e-14)


@pytest.mark.parametrize("name", ["muon_matrix_channel", "linear_attention", "gla", "longhorn"])
def test_rules_that_need_no_bound_on_their_steps(name):
    rule = RULES[name]
    assert rule.step_bound is None
    params, *rest = bold(rule, jnp.float32)
    assert_close(memory.scan(rule, params, None, *rest), memory.scan(rule.unbounded(), params, None, *rest), 1e-6)


def test_weights_are_scaled_back_at_the_start_of_a_chunk():
    rule = MemoryRule(objective=objectives.DotProduct(), optimizer=GD, chunk_size=8, bound=Bound(weight_norm=0.5))
    params, *rest = bold(rule, jnp.float32, time=16)
    _, state = memory.scan(rule, params, None, *slice_time(rest, 0, 8))
    norm = lambda w: jnp.linalg.norm(w, axis=(-2, -1)) / w.shape[-2] ** 0.5
    before, after = (jax.tree.map(norm, weights) for weights in (state.memory, rule.begin_chunk(state.memory)))
    assert any((x > 0.5).any() for x in before.values())
    assert_close(after, jax.tree.map(lambda x: jnp.minimum(x, 0.5), before), 1e-6)
    _, state = memory.scan(rule, params, state, *slice_time(rest, 8, 16))
    assert_close(state.chunk_start, state.memory, 0.0)  # the next chunk begins from here


def test_steep_losses_count_less(x64):
    """Each token's gradient is scaled so that the largest entry of ∂ℓ/∂out is the limit; derivatives include that of the scale."""
    v, out = jnp.zeros((2, 3)), jnp.asarray([[0.5, -1.0, 2.0], [0.1, 8.0, -16.0]])
    loss = lambda slope: lambda x: jnp.sum(bounds.LimitedSlope(objectives.L2(), slope).loss(x, v))
    np.testing.assert_allclose(loss(4.0)(out), objectives.L2().loss(out, v).sum())
    np.testing.assert_allclose(jax.grad(loss(4.0))(out), [[0.5, -1.0, 2.0], [0.025, 2.0, -4.0]], rtol=1e-15)
    for slope in (0.7, 4.0):
        check_grads(jax.grad(loss(slope)), (out,), order=1, modes=["rev"], rtol=1e-6)


def test_a_token_whose_loss_is_steep_is_a_token_with_a_smaller_weight(x64):
    """Without a bound on steps, a slope k times too large makes a step k times smaller."""
    rule = MemoryRule(MATRIX, optimizer=optimizers.Momentum(), chunk_size=4, bound=Bound(step=None, slope=2.0))
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float64, time=4)
    v = v * 6.0
    error = jnp.abs(jnp.einsum("hij,bthj->bthi", params.weights["W"], k) - v).max(axis=-1)
    assert (error > 2.0).any()
    smaller = gates._replace(step_size=gates.step_size * jnp.minimum(1.0, 2.0 / error))
    found = memory.scan(rule, params, None, q, k, v, gates)
    assert_close(found, memory.scan(rule.unbounded(), params, None, q, k, v, smaller), 1e-12)


@pytest.mark.parametrize("name", some_slow(["omeganet", "moneta"], ["moneta"]))
def test_huge_keys(name):
    """Features of size 10⁸: the squares of gradients would leave float32, after about 5,000 and 3,000 tokens."""
    rule = rules.REGISTRY[name]()
    params, q, k, v, _ = make_inputs(rule, batch=1, heads=1, time=8192, key_dim=16, value_dim=16)
    gates = memory.suggested_gates(rule, batch_size=1, time=8192, num_heads=1, key_dim=16, value_dim=16)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    run = jax.jit(memory.scan, static_argnums=0)
    y, state = run(rule, params, None, unit(q), 1e4 * unit(k), v / 4, gates)
    assert jnp.isfinite(y).all()
    assert all(jnp.linalg.norm(w, axis=(-2, -1)).max() < 1024 * w.shape[-2] ** 0.5 for w in state.memory.values())


@pytest.mark.parametrize("q", [2.0, 4.0, 7.0])
def test_no_step_changes_a_mapped_memory_by_more_than_change_along_says(q, x64):
    """Steps from far smaller to far larger than the accumulator, along random and sparse directions."""
    kind = retention.Lq(q)
    for seed in range(20):
        A, D = jax.random.normal(jax.random.key(seed), (2, 5, 7), jnp.float64)
        D = D * (jax.random.uniform(jax.random.key(seed), D.shape) < (0.1, 1.0)[seed % 2])
        most = kind.change_along(A, D)
        assert most >= jnp.sum(D * jax.jvp(kind.map, (A,), (D,))[1]) * (1 - 1e-12)
        for s in 10.0 ** np.arange(-3, 4):
            assert jnp.sum(D * (kind.map(A + s * D) - kind.map(A))) <= s * most * (1 + 1e-9)
    assert kind.change_along(A, jnp.zeros_like(A)) == 0
    assert jnp.isfinite(jax.grad(kind.change_along, argnums=1)(A, jnp.zeros_like(A))).all()


def test_a_norm_that_would_overflow_if_it_were_squared():
    w = bounds.within_norm(2.0, {"W": jnp.full((1, 1, 4, 4), 1e25)})["W"]
    np.testing.assert_allclose(w, 1.0, rtol=1e-6)
    assert not bounds.within_norm(2.0, {"W": jnp.zeros((1, 1, 4, 4))})["W"].any()


@pytest.mark.parametrize("name", ["moneta", "titans", "yaad"])
@pytest.mark.parametrize("size", some_slow([1e-12, 1e-10, 1e-8, 1e-6, 1e-4], [1e-10, 1e-6, 1e-4]))
def test_gradients_are_finite_when_errors_are_small(name, size):
    """A token repeated until it is known has squared gradients far below 1, whose square underflows in a quotient's derivative."""
    rule = RULES[name]
    params, q, k, _, gates = make_inputs(rule, time=12)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    v, _ = memory.scan(rule, params, None, k, k, jnp.zeros_like(k), gates._replace(step_size=0.0 * gates.step_size))

    def loss(params, k, v, gates):
        y, state = memory.scan(rule, params, None, q, k, v, gates)
        return jnp.sum(y * y) + sum(jnp.sum(w * w) for w in state.memory.values())

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(params, k, v + size, gates)
    for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        assert jnp.isfinite(gradient).all(), jax.tree_util.keystr(path)


def test_moneta_with_strong_retention_over_many_tokens():
    """The printed map is NaN after 45,000 tokens."""
    rule = rules.moneta(structure=structures.MLP(expansion=1))
    params, q, k, v, gates = make_inputs(rule, batch=1, heads=1, time=65_536)
    gates = gates._replace(retention=0.9 + 0.1 * jax.random.uniform(jax.random.key(0), gates.retention.shape))
    y, state = jax.jit(lambda *args: memory.scan(rule, params, None, *args))(q, k, v, gates)
    assert jnp.abs(y).max() < 10
    assert all(jnp.abs(w).max() < 10 for w in state.memory.values())


# Their gates are those of the other rules.
SUGGESTED_IF_SLOW = {
    "titans_no_momentum", "dla", "swla", "atlas_plus_plus", "memora", "ttt_mlp", "deep_transformer", "titans", "omeganet",
    "swdt", "ttt_linear", "polysketch", "longhorn", "retnet",
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(rules.REGISTRY, SUGGESTED_IF_SLOW))
def test_suggested_gates_are_a_rules_gates(name):
    rule = rules.REGISTRY[name]()
    gates = memory.suggested_gates(rule, batch_size=2, time=5, num_heads=3, key_dim=4)
    params = memory.init_params(rule, jax.random.key(0), num_heads=3, key_dim=4, value_dim=4)
    state = memory.init_state(rule, params, batch_size=2, max_length=9)
    q, k, v = jax.random.normal(jax.random.key(1), (3, 2, 5, 3, 4))
    call_checks.check_gate_ranges(gates, "memory.scan")
    y, state = jax.eval_shape(lambda *args: memory.scan(rule, params, *args), state, q, k, v, gates)
    one = memory.suggested_gates(rule, batch_size=2, time=None, num_heads=3, key_dim=4)
    token = jax.tree.map(lambda x: x[:, 0], (q, k, v))
    y, _ = jax.eval_shape(lambda *args: memory.step(rule, params, *args), state, *token, one)
    assert y.shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "step must be a number > 0 or None, got 0": lambda: Bound(step=0),
        "slope must be a number > 0 or None, got -1": lambda: Bound(slope=-1),
        "horizon must be a number ≥ 1, got 0.5": lambda: Bound(horizon=0.5),
        "weight_norm must be a number > 0 or None, got 'x'": lambda: Bound(weight_norm="x"),
        "bound must be a Bound or None, got 1.0": lambda: MemoryRule(bound=1.0),
        "suggested_gates: time must be an integer ≥ 1, got 0": lambda: memory.suggested_gates(
            rules.titans(), batch_size=1, time=0, num_heads=1, key_dim=4
        ),
        "suggested_gates: num_heads must be an integer ≥ 1, got None": lambda: memory.suggested_gates(
            rules.titans(), batch_size=1, time=1, num_heads=None, key_dim=4
        ),
    }.items(),
)
def test_bad_arguments(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_bound_is_part_of_a_rules_identity():
    assert rules.titans() != rules.titans().unbounded()
    assert rules.titans().unbounded().step_bound is None
    assert rules.delta_rule().step_bound == rules.gated_delta_rule().step_bound == 2.0
    assert dataclasses.replace(rules.omeganet(), bound=Bound(step=None)).step_bound is None
    assert MemoryRule(features=features.Polynomial(2), bound=Bound(weight_norm=None)).norm_bound is None


def test_the_derivative_of_the_largest_entry_goes_to_one():
    """Nothing is divided by the number of equal entries, which a compiler may find to be none."""
    x = jnp.asarray([[1.0, 3.0, 2.0], [2.0, 2.0, 1.0]])
    gradient = jax.grad(lambda x: jnp.sum(largest_entry(x) * jnp.asarray([5.0, 7.0])))
    np.testing.assert_array_equal(gradient(x), [[0.0, 5.0, 0.0], [7.0, 0.0, 0.0]])
    assert " div " not in str(jax.make_jaxpr(gradient)(x))


def without_effect(rule, dtype=jnp.float64, time=11, **overrides):
    """Inputs with tokens whose n is zero: values of zero that an empty memory reads first, and writes without weight."""
    params, q, k, v, gates = make_inputs(rule, dtype=dtype, time=time, batch=1, step_size=0.5, **overrides)
    if all(w.ndim == 3 and name == "W" for name, w in params.weights.items()):
        params = params._replace(weights=jax.tree.map(jnp.zeros_like, params.weights))
        v = v.at[:, :2].set(0.0)
    if gates.window_weights is not None:
        gates = gates._replace(window_weights=gates.window_weights.at[:, :1].set(0.0).at[:, 5:8].set(0.0))
    return params, q, k, v, gates


@pytest.mark.parametrize(
    "rule",
    [
        rules.delta_rule(4),
        MemoryRule(MATRIX, objectives.L2(), optimizer=optimizers.Momentum(), window=3, chunk_size=4),
        if_slow(MemoryRule(MATRIX, objectives.L2(), optimizer=GD, window=2, chunk_size=8)),
        rules.omeganet(chunk_size=8, window=3),
    ],
    ids=["delta", "momentum", "window", "omeganet"],
)
def test_the_derivative_of_a_step_that_is_zero(rule, x64):
    """Of a token with n = 0: its value and its step are zero, but not how later tokens depend on it."""
    inputs = without_effect(rule)
    assert_close(*(graded(fn, rule, *inputs)[1] for fn in (memory.scan, memory.reference)), 1e-10)
