"""One table of rules and a maker of inputs, shared by every test of the memory core."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax import memory, rules
from atlasjax.memory import Bound, features, objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from tests.memory.own_ideas import IDEAS

MATRIX, GD = structures.Matrix(), optimizers.GradientDescent()

# Every choice appears at least once; windows longer than chunks, chunks longer than a block, one-token chunks.
RULES: dict[str, MemoryRule] = {
    "linear_attention": rules.linear_attention(),
    "delta_rule": rules.delta_rule(),
    "delta_rule_decay": MemoryRule(
        MATRIX, objectives.L2(), features.Polynomial(2), GD, retention.Scalar(), chunk_size=1
    ),
    "delta_rule_chunk8": rules.delta_rule(8),
    "retnet": rules.retnet(),
    "gla": rules.gla(),
    "mamba3": rules.mamba3(rank=2),
    "polysketch": rules.polysketch(),
    "longhorn": rules.longhorn(),
    "longhorn_channel": rules.longhorn_channel(),
    "gated_delta_rule": rules.gated_delta_rule(),
    "momentum_delta": rules.momentum_delta(),
    "momentum_delta_full": MemoryRule(
        MATRIX, objectives.L2(), features.Polynomial(2), optimizers.Momentum(), retention.Full(), chunk_size=1, bound=None
    ),
    "gated_delta_momentum": MemoryRule(
        MATRIX, objectives.L2(), features.Powers(2), optimizers.Momentum(), retention.Channel(decay_first=True),
        window=2, chunk_size=1,
    ),
    "kda": rules.kda(),
    "rwkv7": rules.rwkv7(),
    "rwkv7_one_key": rules.rwkv7_one_key(),
    "gdn2": rules.gdn2(),
    "comba": rules.comba(),
    "pgdn": rules.pgdn(),
    "read_key_decays_last": dataclasses.replace(rules.gdn2(), retention=retention.Channel()),
    "delta_rule_channel_steps": MemoryRule(
        MATRIX, objectives.L2(), optimizer=optimizers.GradientDescent(per_channel=True), chunk_size=1
    ),
    "channel_steps_chunk8": MemoryRule(
        MATRIX, objectives.L2(), features.TensorSketch(2, 8), optimizers.GradientDescent(per_channel=True), chunk_size=8
    ),
    "channel_delta_momentum": MemoryRule(
        MATRIX, objectives.L2(), optimizer=optimizers.Momentum(), retention=retention.Channel(), window=3, chunk_size=20
    ),
    "ttt_linear": rules.ttt_linear(8),
    "ttt_mlp": rules.ttt_mlp(8, expansion=2),
    "titans": rules.titans(8),
    "titans_online": rules.titans(1),
    "titans_unbounded": rules.titans(8).unbounded(),
    "titans_at_its_limits": MemoryRule(chunk_size=8, window=2, bound=Bound(slope=0.5, weight_norm=0.9)),
    "titans_matrix": rules.titans(16, MATRIX),
    "titans_no_momentum": rules.titans_no_momentum(8),
    "titans_deep": rules.titans(8, structures.MLP(depth=3, expansion=2, activation="silu")),
    "titans_long_chunk": rules.titans(150, structures.MLP(expansion=1)),
    "dla": rules.dla(8),
    "swla": rules.swla(8, window=5),
    "omeganet": rules.omeganet(8, window=4),
    "omeganet_window_over_chunk": rules.omeganet(4, window=11, features=features.Identity()),
    "omeganet_powers": rules.omeganet(8, 3, features=features.Powers(3)),
    "omeganet_sketch": rules.omeganet(8, 3, features=features.TensorSketch(2, 8)),
    "yaad_window": MemoryRule(objective=objectives.Huber(), window=3, chunk_size=8),
    "dgd": rules.dgd(8),
    "dgd_matrix": rules.dgd(6, MATRIX),
    "moneta": rules.moneta(8, structure=structures.MLP(expansion=2)),
    "moneta_row": rules.moneta(8, q=2.0),
    "yaad": rules.yaad(8),
    "memora": rules.memora(8, structures.MLP(expansion=2)),
    "memora_matrix": rules.memora(20, structures.Matrix()),
    "map_momentum_window": MemoryRule(
        structures.GatedMLP(expansion=1), optimizer=optimizers.Momentum(), retention=retention.KL(), window=3,
        chunk_size=9,
    ),
    "titans_write_gate": dataclasses.replace(rules.titans(8), optimizer=optimizers.Momentum(write_gate=True)),
    "write_gate_channel_window": MemoryRule(
        MATRIX, objectives.L2(), features.Polynomial(2), optimizers.Momentum(write_gate=True), retention.Channel(),
        window=3, chunk_size=20,
    ),
    "write_gate_map": MemoryRule(
        MATRIX, optimizer=optimizers.Momentum(write_gate=True), retention=retention.KL(), window=2, chunk_size=9
    ),
    "write_gate_own_retention": dataclasses.replace(
        IDEAS["own_retention"], structure=MATRIX, optimizer=optimizers.Momentum(write_gate=True)
    ),
    "momentum_full_retention": MemoryRule(retention=retention.Full(), chunk_size=8, window=2),
    "gated": MemoryRule(structures.GatedMLP(expansion=2), window=2, chunk_size=8),
    "atlas": rules.atlas(8, 3, structures.MLP(expansion=2), features.Powers(2)),
    "atlas_every": rules.atlas(12, 5, structures.MLP(expansion=2), features.Identity(), newton_schulz_every=4),
    "atlas_online": rules.atlas(1, 2, structures.MLP(expansion=2), features.Identity(), newton_schulz_steps=2),
    "atlas_convergent": rules.atlas(10, 2, structures.MLP(expansion=2), features.Identity(), schedule="polar_express"),
    "atlas_plus_plus": rules.atlas_plus_plus(8, 3, features.Identity()),
    "muon_matrix_channel": MemoryRule(
        MATRIX, objectives.L2(), optimizer=optimizers.Muon(3), retention=retention.Channel(), window=2, chunk_size=6
    ),
    # Small ones, with which choices are compared by default: a program of a matrix, and of no bound, takes a third of the time.
    "gated_small": MemoryRule(
        structures.GatedMLP(expansion=1), objectives.Huber(), optimizer=GD, chunk_size=8, bound=None
    ),
    "deep_small": MemoryRule(structures.MLP(depth=3, expansion=1), optimizer=GD, chunk_size=8, bound=None),
    "plain_small": MemoryRule(structures.PlainMLP(expansion=1), optimizer=GD, chunk_size=8, bound=None),
    "swiglu_small": MemoryRule(structures.SwiGLU(), optimizer=GD, chunk_size=8, bound=None),
    "moneta_matrix": rules.moneta(8, structure=MATRIX).unbounded(),
    "ttt_mlp_small": rules.ttt_mlp(8, expansion=1).unbounded(),
    **IDEAS,
}  # fmt: skip


def make_inputs(rule, *, batch=2, time=37, heads=2, key_dim=4, value_dim=4, dtype=jnp.float32, seed=0, **overrides):
    """(params, q, k, v, gates): normalized keys, gates inside their ranges, a nonzero M_0.

    `overrides` sets gates to constants, e.g. retention=0.0.
    """
    rng = np.random.default_rng(seed)
    wide = jnp.promote_types(dtype, jnp.float32)
    params = memory.init_params(rule, jax.random.key(seed), num_heads=heads, key_dim=key_dim, value_dim=value_dim)
    jitter = lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape), wide)
    params = jax.tree.map(jitter, params)
    normal = lambda dim: rng.standard_normal((batch, time, heads, dim))
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v = unit(normal(key_dim)), unit(normal(key_dim)), normal(value_dim)
    scale = {
        "retention": (0.7, 1.0),
        "momentum_decay": (0.2, 0.9),
        "write_size": (0.0, 1.0),
        "window_weights": (0.1, 1.0),
        "threshold": (0.3, 1.0),
    }
    scale["step_size"] = (0.01, 0.05) if not rule.uses_muon else (0.005, 0.02)
    if rule.is_linear or rule.is_linear_with_momentum:
        scale["step_size"] = (0.1, 1.0)
    scale |= {"removal_key": (-0.5, 0.5), "removal": (0.2, 1.0)}
    gates = {}
    for name, channels in rule.gate_channels(key_dim, value_dim).items():
        low, high = scale[name]
        shape = (batch, time, heads) if channels is None else (batch, time, heads, channels)
        value = rng.uniform(low, high, shape)
        if name in overrides:
            value = np.full(shape, overrides[name])
        gates[name] = jnp.asarray(value, wide)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return params, q, k, v, memory.Gates(**gates)


def assert_close(actual, expected, tolerance, what=""):
    """Every leaf within `tolerance` times the largest magnitude of the expected leaf (at least 1e-3 of the whole tree's)."""
    flat, _ = jax.tree_util.tree_flatten_with_path(expected)
    actual_leaves = jax.tree.leaves(actual)
    assert len(flat) == len(actual_leaves)
    floating = [
        np.abs(np.asarray(x, np.float64)).max(initial=0) for _, x in flat if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    floor = 1e-3 * max(floating, default=0)
    for (path, want), have in zip(flat, actual_leaves):
        name = what + jax.tree_util.keystr(path)
        want, have = np.asarray(want), np.asarray(have)
        assert want.shape == have.shape, name
        if np.issubdtype(want.dtype, np.integer):
            np.testing.assert_array_equal(have, want, err_msg=name)
            continue
        want, have = want.astype(np.float64), have.astype(np.float64)
        assert np.isfinite(have).all(), f"{name}: not finite"
        error = np.abs(have - want).max(initial=0)
        scale = max(np.abs(want).max(initial=0), floor, 1e-30)
        assert error <= tolerance * scale, f"{name}: error {error:.3e}, scale {scale:.3e}, ratio {error / scale:.3e}"


def objective(fn, rule, params, q, k, v, gates, state=None, **kwargs):
    """A scalar that every output and every state leaf enters with its own weight; and those."""
    y, state = fn(rule, params, state, q, k, v, gates, **kwargs)
    total = jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            total += jnp.sum(jnp.sin(leaf + jnp.arange(leaf.size).reshape(leaf.shape)))
    return total, (y, state)


def graded(fn, rule, *args, **options):
    """((objective, (y, state)), its gradients by params, q, k, v and gates) of one compiled call."""
    run = lambda *args: objective(fn, rule, *args, **options)
    return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3, 4), has_aux=True))(*args)


def slice_time(gates, start, stop):
    return jax.tree.map(lambda x: x[:, start:stop], gates)


def steps(rule, params, state, q, k, v, gates):
    """One `memory.step` a token; outputs, final state, and the state before every token (time axis first)."""

    def body(state, xs):
        y, new = memory.step(rule, params, state, *xs)
        return new, (y, state)

    last, (y, before) = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, gates)))
    return jnp.moveaxis(y, 0, 1), last, before


def check_every_split(rule, params, tokens, state, given, piece, tolerance):
    """One token at a time equals the reference; and a call that begins after ANY number of tokens goes on exactly.

    Args:
      tokens: q, k, v and gates of one row.
      state, given: the state before the first token, and the reference's, which may be None.
      piece: tokens of the calls that begin anywhere.

    Returns:
      The starts of these calls, the states before and after them, and the reference's y.
    """
    expected, final = jax.jit(lambda: memory.reference(rule, params, given, *tokens))()
    y, last, before = jax.jit(lambda: steps(rule, params, state, *tokens))()
    assert_close(y, expected, tolerance, what="steps")
    assert_close(last, final, tolerance, what="state after steps")

    # Every start is a row of one batch, each with its own place in its chunk.
    starts = np.arange(expected.shape[1] - piece + 1)
    rows = starts[:, None] + np.arange(piece)
    states = jax.tree.map(lambda x: x[starts, 0], before)
    pieces = jax.tree.map(lambda x: x[0][rows], tokens)
    y, after = jax.jit(lambda: memory.scan(rule, params, states, *pieces))()
    assert_close(y, expected[0][rows], tolerance, what="piece")
    at_end = jax.tree.map(lambda x: x[starts[:-1] + piece, 0], before)
    assert_close(jax.tree.map(lambda x: x[:-1], after), at_end, tolerance, what="state after piece")
    return starts, states, after, expected


def check_every_split_and_read(rule, params, tokens, piece, tolerance, state=None):
    """`check_every_split` of the first row; a read after each call sees what its last token does. state: None is a fresh one."""
    tokens = jax.tree.map(lambda x: x[:1], tokens)
    first = memory.init_state(rule, params, batch_size=1) if state is None else state
    starts, _, after, expected = check_every_split(rule, params, tokens, first, state, piece, tolerance)
    last = starts + piece - 1
    looked = jax.jit(lambda: memory.read(rule, params, after, tokens[0][0, last, None]))()
    assert_close(looked[:, 0], expected[0, last], tolerance, what="read")
