"""The XLA engine against the token-by-token reference: outputs, final state, gradients.

Tracing and compiling is what it costs, and gradients cost several times what values do. So tests of one rule share two functions
of one shape, and run in one worker; and where rules or lengths are many, gradients are compared for some of them (`RELATIVES`,
`LENGTHENED`) and for all with `-m slow`. Values and states are compared here or in test_streaming.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import structures
from tests.marks import some_slow
from tests.memory.cases import RULES, assert_close, make_inputs, objective
from tests.memory.test_streaming import SPLIT_IF_SLOW

# Two forms of one function in float64; the slack is for sums in another order, amplified by Newton–Schulz.
EXACT = 1e-9


# Rules whose every choice is in other rules; gradients if slow.
RELATIVES = set(RULES) - {
    "all_of_them", "atlas_every", "channel_steps_chunk8", "deep_small", "delta_rule_decay", "dgd_matrix", "gated_delta_momentum",
    "gated_delta_rule", "gated_small", "gdn2", "gla", "longhorn", "longhorn_channel", "memora_matrix", "moneta_matrix",
    "muon_matrix_channel", "own_delta_rule", "own_loss_matrix", "own_sign_momentum", "plain_small", "rwkv7", "ttt_linear",
    "ttt_mlp_small", "momentum_delta", "write_gate_map", "swiglu_small",
}  # fmt: skip


def each_rule(names, slow=()):
    """The tests of one rule run one after another, in one worker: `run_together`."""
    return pytest.mark.parametrize("name", some_slow(names, slow))


def shared_inputs(rule, **overrides):
    """Of the one shape for which a rule's functions are compiled: a block and a part of one."""
    return make_inputs(rule, **{"time": 70, "heads": 6, "dtype": jnp.float64, **overrides})


@functools.lru_cache(maxsize=4)
def shared(rule):
    return both(rule)


def both(rule, **kwargs):
    """Jitted value-and-gradient functions of the reference and of the engine."""
    functions = []
    for fn in (memory.reference, memory.scan):
        run = lambda *args, fn=fn: objective(fn, rule, *args, **kwargs)
        functions.append(jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3, 4), has_aux=True)))
    return functions


# Every structure, objective, optimizer and retention; the other rules' rounding runs if slow.
ROUNDED = (
    "all_of_them", "atlas_every", "dgd_matrix", "gated_delta_momentum", "gated_small", "gdn2", "gla", "longhorn_channel",
    "memora_matrix", "moneta_matrix", "own_delta_rule", "own_loss_matrix", "own_sign_momentum", "plain_small", "rwkv7",
    "swiglu_small",
)  # fmt: skip


@each_rule(RULES, slow=RELATIVES)
def test_outputs_state_and_gradients(name, x64):
    rule = RULES[name]
    args = shared_inputs(rule)
    reference, engine = shared(rule)
    assert_close(engine(*args), reference(*args), EXACT)


def choices(rule):
    """What decides which parts of the engine a rule uses, two at a time; and every choice by itself."""
    name = lambda x: type(x).__name__
    structure = name(rule.structure), getattr(rule.structure, "depth", None), rule.structure.norm
    optimizer = (
        name(rule.optimizer),
        getattr(rule.optimizer, "per_channel", None),
        getattr(rule.optimizer, "every", 1) > 1,
        rule.optimizer.write_gate,
    )
    window = rule.window > 1, rule.window > rule.chunk_size, rule.chunk_size == 1
    parts = {"structure": structure, "optimizer": optimizer, "window": window}
    parts["retention"] = name(rule.retention), rule.retention.decay_first
    others = {
        "objective": name(rule.objective),
        "features": name(rule.features),
        "linear": (rule.is_linear, rule.is_linear_with_momentum),
    }
    bounds = rule.step_bound is not None, rule.norm_bound is not None
    return {*itertools.combinations(sorted(parts.items()), 2), *others.items(), ("bounds", bounds)}


def alone(rule):
    pairs = choices(rule)
    return {part for pair in pairs for part in (pair if isinstance(pair[0], tuple) else (pair,))}


def axes(rule):
    return {type(axis).__name__ for axis in (rule.structure, rule.objective, rule.optimizer, rule.retention)}


def of_all(parts, names):
    return set().union(*(parts(RULES[name]) for name in names))


def test_every_choice_is_compared():
    """In gradients, in every split of a stream, and in rounding."""
    every = of_all(alone, RULES)
    assert of_all(alone, set(RULES) - set(RELATIVES)) == every
    assert of_all(alone, set(RULES) - set(SPLIT_IF_SLOW)) == every
    assert of_all(axes, ROUNDED) == of_all(axes, RULES)


LENGTHS = 1, 63, 100, 257
# And the lengths at which values, and gradients, are compared by default: one token, several blocks, a block not full. All are
# compared at the 70 tokens of `shared_inputs`.
LENGTHENED = {
    "omeganet_window_over_chunk": (100,), "atlas_every": (1,), "channel_delta_momentum": (63,), "delta_rule_decay": (257,),
    "gated_delta_rule": (1,), "rwkv7": (63,), "longhorn_channel": (257,), "memora": (),
    "deep_small": (),
}  # fmt: skip
GRADED_LENGTHS = {
    "omeganet_window_over_chunk": (), "atlas_every": (), "channel_delta_momentum": (), "delta_rule_decay": (),
    "gated_delta_rule": (), "rwkv7": (), "longhorn_channel": (), "memora": (), "deep_small": (1,),
}  # fmt: skip


def each_length(default):
    every = itertools.product(LENGTHENED, LENGTHS)
    slow = lambda name, time: [] if time in default[name] else [pytest.mark.slow]
    return pytest.mark.parametrize(("name", "time"), [pytest.param(*x, marks=slow(*x)) for x in every])


@each_length(LENGTHENED)
def test_any_length(name, time, x64):
    rule = RULES[name]
    args = make_inputs(rule, time=time, batch=1, dtype=jnp.float64)
    run = lambda fn: jax.jit(lambda params, *rest: fn(rule, params, None, *rest))(*args)
    assert_close(run(memory.scan), run(memory.reference), EXACT)


@each_length(GRADED_LENGTHS)
def test_gradients_at_any_length(name, time, x64):
    rule = RULES[name]
    args = make_inputs(rule, time=time, batch=1, dtype=jnp.float64)
    reference, engine = both(rule)
    assert_close(engine(*args), reference(*args), EXACT)


EDGES = [
    {"retention": 0.0},
    {"retention": 1.0},
    {"momentum_decay": 0.0},
    {"momentum_decay": 1.0, "retention": 0.5},
    {"window_weights": 0.0},
    {"step_size": 0.0},
    {"write_size": 0.0},
    {"write_size": 1.0, "momentum_decay": 1.0},
    {"retention": 0.0, "momentum_decay": 0.0},
    {"threshold": 1e-3},
    {"threshold": 1e3},
    {"removal": 0.0},
    {"removal": 1.0, "retention": 0.0},
]


EDGED = (
    "titans", "yaad_window", "omeganet", "atlas", "muon_matrix_channel", "gla", "moneta_row", "memora", "delta_rule_decay",
    "gated_delta_rule", "rwkv7", "longhorn_channel", "gated_small", "memora_matrix", "moneta_matrix",
    "write_gate_map",
)  # fmt: skip


@each_rule(EDGED, slow=RELATIVES)
def test_extreme_gates(name, x64):
    rule = RULES[name]
    reference, engine = shared(rule)
    for override in EDGES:
        if not set(override) & set(rule.gate_channels(4)):
            continue
        args = shared_inputs(rule, **override)
        assert_close(engine(*args), reference(*args), EXACT, what=str(override))
    # A decay of exactly zero among others cuts the past off there, also for the derivatives.
    params, q, k, v, gates = shared_inputs(rule)
    if gates.retention is not None:
        gates = gates._replace(retention=gates.retention.at[:, 5].set(0.0).at[:, 6].set(0.0))
        assert_close(engine(params, q, k, v, gates), reference(params, q, k, v, gates), EXACT, what="zero decay")
    zero = jnp.zeros_like(k)
    assert_close(engine(params, q, zero, v, gates), reference(params, q, zero, v, gates), EXACT, what="zero keys")
    assert_close(
        engine(params, zero, zero, zero, gates), reference(params, zero, zero, zero, gates), EXACT, what="all zero"
    )


@each_rule(RULES, slow=set(RULES) - set(ROUNDED))
def test_float32_and_bfloat16(name):
    """Against the same inputs in float64. Relative to the largest output: 2e-5 (Muon 2e-3) and 4e-2 (Muon 1e-1).

    Newton–Schulz multiplies rounding by about 3.4 at every step (SEMANTICS 1.7).
    """
    rule = RULES[name]
    # A LayerNorm over four channels can come near a variance of zero, where rounding is all that is left.
    dim = 16 if rule.structure.norm else 4
    params, q, k, v, gates = shared_inputs(rule, heads=2, dtype=jnp.float32, key_dim=dim, value_dim=dim)
    engine = jax.jit(lambda params, *rest: memory.scan(rule, params, None, *rest))
    reference, _ = shared(rule)
    up = lambda x: jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64)
    thrice = lambda tree, axis: jax.tree.map(lambda x: jnp.concatenate([up(x)] * 3, axis), tree)
    for dtype, tolerance in {jnp.float32: 2e-5, jnp.bfloat16: 4e-2}.items():
        if rule.uses_muon:
            tolerance = {jnp.float32: 2e-3, jnp.bfloat16: 1e-1}[dtype]
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        y, state = engine(params, q, k, v, gates)
        assert y.dtype == dtype
        floating = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert all(x.dtype == jnp.float32 for x in floating)
        with jax.enable_x64(True):
            (_, (expected, _)), _ = reference(thrice(params, 0), *thrice((q, k, v, gates), 2))  # six heads are compiled
            assert_close(y.astype(jnp.float32), expected[:, :, :2], tolerance, what=str(dtype))


@each_rule(
    ["titans", "omeganet_window_over_chunk", "atlas_every", "gla", "swla", "ttt_mlp"],
    slow=["titans", "ttt_mlp", "atlas_every", "gla", "omeganet_window_over_chunk"],  # the definition is causal
)
def test_causality(name):
    """The Jacobian of outputs with respect to inputs is exactly zero above the diagonal."""
    rule = RULES[name]
    params, *inputs = make_inputs(rule, time=15, batch=1, heads=1)

    def outputs(inputs):
        q, k, v, gates = inputs
        return memory.scan(rule, params, None, q, k, v, gates)[0][0].sum((-1, -2))

    jacobian = jax.jit(jax.jacrev(outputs))(inputs)
    depends = 0
    for leaf in jax.tree.leaves(jacobian):
        by_time = np.abs(np.asarray(leaf)).reshape(15, 15, -1).sum(-1)
        assert (np.triu(by_time, 1) == 0).all()
        depends += (np.tril(by_time) > 0).sum()
    assert depends > 15


@each_rule(
    ["titans", "omeganet", "atlas", "gla", "linear_attention"], slow=["titans", "atlas", "gla", "linear_attention"]
)
def test_batch_elements_and_heads_do_not_meet(name):
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, batch=3, heads=3)
    engine = jax.jit(lambda *args: memory.scan(rule, params, None, *args)[0])
    before = np.asarray(engine(q, k, v, gates))
    wild = lambda x: x.at[1, :, 2].set(x[1, :, 2] * 0.5 + 0.1)
    after = np.asarray(engine(wild(q), wild(k), wild(v), jax.tree.map(wild, gates)))
    changed = (before != after).any(axis=(1, 3))
    expected = np.zeros((3, 3), bool)
    expected[1, 2] = True
    np.testing.assert_array_equal(changed, expected)


def test_read_looks_without_writing():
    rule = RULES["omeganet"]
    params, q, k, v, gates = make_inputs(rule)
    y, state = memory.scan(rule, params, None, q, k, v, gates)
    np.testing.assert_allclose(memory.read(rule, params, state, q[:, -1:])[:, 0], y[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["titans_matrix", "delta_rule"])
def test_outside_jit_a_call_is_one_program(name, compiled):
    """Operation by operation it was hundreds, and the loop over chunks was compiled again in every call."""
    rule = RULES[name]
    params, *tokens = make_inputs(rule, batch=1, time=29, heads=3)
    state = memory.init_state(rule, params, batch_size=1)
    now = jax.tree.map(lambda x: x[:, 0], tokens)
    calls = {
        "scan": lambda: memory.scan(rule, params, None, *tokens),
        "step": lambda: memory.step(rule, params, state, *now),
        "read": lambda: memory.read(rule, params, state, tokens[0]),
        "reference": lambda: memory.reference(rule, params, None, *tokens),
    }
    compiled.clear()
    for call, first in calls.items():
        first()
        assert len(compiled) == 1, call
        compiled.clear()
        first()
        assert not compiled, call


AROUND = {
    "titans_matrix": RULES["titans_matrix"],
    "grm": memory.CachedRule(RULES["delta_rule"], "grm", 4, connector="query"),
    "ssc": memory.CachedRule(RULES["delta_rule"], "ssc", 4, connector="query"),
    "soup": memory.CachedRule(rules.dla(2, structures.MLP(expansion=1)), "soup", 4, connector="query"),
    "log_linear": memory.LogLinearRule(RULES["delta_rule"], 4, levels=2),
    "softmax": memory.SoftmaxRule(structures.Matrix(), window=2, cache_window=4),
}


@pytest.mark.parametrize("name", some_slow(AROUND, {"soup", "ssc"}))
def test_outside_jit_a_call_is_compiled_once(name, compiled):
    """From a state, in the states of all layers, in pieces, and backward: none of their loops is compiled again."""
    rule = AROUND[name]
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=2, value_dim=2)
    tokens = (*jnp.ones((3, 1, 32, 1, 2)), memory.suggested_gates(rule, batch_size=1, time=32, num_heads=1, key_dim=2))
    state = memory.init_state(rule, params, batch_size=1, max_length=40)
    states, now = jax.tree.map(lambda x: x[None], state), jax.tree.map(lambda x: x[:, 0], tokens)
    calls = {
        "step": lambda: memory.step(rule, params, state, *now),
        "step of a layer": lambda: memory.step(rule, params, states, *now, layer=0),
        "scan from a state": lambda: memory.scan(rule, params, state, *tokens),
        "truncated scan": lambda: memory.scan(rule, params, None, *tokens, truncation=16),
        "gradient": lambda: jax.grad(lambda q, *rest: memory.scan(rule, params, None, q, *rest)[0].sum())(*tokens),
    }
    for call, run in calls.items():
        run()
        compiled.clear()
        run()
        assert not compiled, call


def test_outside_jit_a_partition_is_compiled_once(compiled):
    rule = RULES["delta_rule"]
    params, *tokens = make_inputs(rule, batch=1, time=8)
    mesh = jax.make_mesh((2,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    run = lambda: memory.scan(rule, params, None, *tokens, partition=memory.Partition(mesh, time=("sequence",)))
    run()
    compiled.clear()
    run()
    assert not compiled


def test_newton_schulz_steps_change_at_run_time():
    rule = RULES["muon_matrix_channel"]
    params, q, k, v, gates = make_inputs(rule)
    for steps in (0, 2):
        other = rule.with_newton_schulz(steps=steps)
        state = memory.init_state(rule, params, batch_size=2)
        y, _ = memory.scan(other, params, state, q, k, v, gates)
        expected, _ = memory.reference(other, params, state, q, k, v, gates)
        assert_close(y, expected, 2e-3)


def test_backward_memory_grows_with_boundaries_not_with_tokens():
    """Temporary bytes of forward and backward: linear in length, far below one weight matrix per token."""
    rule = RULES["titans"].__class__(chunk_size=32)

    def temporary_bytes(time):
        args = jax.eval_shape(lambda: make_inputs(rule, batch=1, time=time, heads=1, key_dim=16, value_dim=16))
        loss = lambda params, *args: memory.scan(rule, params, None, *args)[0].sum()
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(512), temporary_bytes(2048)
    assert long <= 4.2 * short
    weights = 2 * 64 * 16 * 4
    assert long < 2048 * weights / 5
