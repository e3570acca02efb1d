"""Streaming and packing: any cut of a sequence into calls is the same function; packed segments are as if alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from tests.marks import each_name
from tests.memory.cases import RULES, assert_close, check_every_split, make_inputs, steps

EXACT = 1e-9
TIME, PIECE = 26, 11


# Rules whose every choice is in other rules (`test_every_choice_is_compared`); the cheap ones of them run by default too.
SPLIT_IF_SLOW = (
    "delta_rule_decay", "channel_delta_momentum", "titans", "titans_unbounded", "titans_at_its_limits", "titans_matrix",
    "titans_no_momentum", "titans_long_chunk", "dla", "omeganet", "omeganet_window_over_chunk", "omeganet_powers",
    "omeganet_sketch", "yaad_window", "yaad", "moneta", "moneta_row", "memora", "map_momentum_window",
    "momentum_full_retention", "gated", "atlas", "atlas_convergent", "atlas_plus_plus", "muon_matrix_channel", "own_loss",
    "own_structure", "own_adam", "own_features", "own_retention", "titans_deep", "titans_online", "ttt_mlp",
    "delta_rule", "delta_rule_chunk8", "linear_attention", "retnet", "rwkv7_one_key", "delta_rule_channel_steps", "gla", "swla",
    "titans_write_gate", "write_gate_channel_window", "write_gate_own_retention", "momentum_delta_full",
)  # fmt: skip


@each_name(RULES, slow=SPLIT_IF_SLOW)
def test_every_split(name, x64):
    rule = RULES[name]
    params, *tokens = make_inputs(rule, batch=1, time=TIME, dtype=jnp.float64)
    state = memory.init_state(rule, jax.tree.map(lambda x: x.astype(jnp.float64), params), batch_size=1)
    check_every_split(rule, params, tokens, state, None, PIECE, EXACT)


@pytest.mark.parametrize("rule", [rules.gated_delta_rule(), rules.in_place_ttt(2)], ids=["linear", "large_chunk"])
@pytest.mark.parametrize("wide", ["tokens", "params"])
def test_a_step_of_wider_tokens_or_parameters_than_the_state(rule, wide, x64):
    narrow = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    narrow = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    state = memory.init_state(rule, narrow, batch_size=1)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), narrow) if wide == "params" else narrow
    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 2, 4), jnp.float64 if wide == "tokens" else jnp.float32)
    channels = rule.gate_channels(4, 4)
    gates = memory.Gates(**{name: jnp.full((1, 2) if c is None else (1, 2, c), 0.5) for name, c in channels.items()})
    y, _ = memory.step(rule, params, state, q, k, v, gates)
    assert y.dtype == q.dtype
    up = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    expected, _ = memory.step(rule, *jax.tree.map(up, (params, state, q, k, v, gates)))
    assert_close(y, expected, 1e-6)


def test_the_definition_with_wider_parameters_than_the_state(x64):
    """Where a segment starts, its memory is that of the parameters."""
    rule = rules.gated_delta_rule()
    params, *inputs = make_inputs(rule, batch=1, time=3, dtype=jnp.float32)
    state = memory.init_state(rule, params, batch_size=1)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    ids = jnp.asarray([[0, 1, 1]])
    y, after = memory.reference(rule, wide, state, *inputs, segment_ids=ids)
    expected = memory.scan(rule, wide, state, *inputs, segment_ids=ids, max_segments=2)
    assert_close((y, after), expected, 1e-6)
    assert (y.dtype, after.memory["W"].dtype) == (jnp.float32, jnp.float32)


@each_name(["titans_at_its_limits", "atlas_every"], slow=["titans_at_its_limits"])
def test_a_step_of_rows_at_different_places(name, x64):
    """A step takes a shorter program for rows that neither begin nor end a chunk, nor write with Muon: for all, most or none."""
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, batch=1, time=TIME, dtype=jnp.float64)
    state = memory.init_state(rule, jax.tree.map(lambda x: x.astype(jnp.float64), params), batch_size=1)
    expected, _, before = jax.jit(lambda: steps(rule, params, state, q, k, v, gates))()
    step = jax.jit(lambda state, *token: memory.step(rule, params, state, *token))
    places = np.arange(TIME - 1)
    position = places % rule.chunk_size + 1
    special = (
        (position == 1) | (position == rule.chunk_size) | ((position % rule.optimizer.every == 0) & rule.uses_muon)
    )
    shorter, longer = places[~special], places[special]
    assert len(shorter) > 8
    assert len(longer) > 4
    for rows in (shorter[:9], np.concatenate([longer[:1], shorter[:8]]), np.concatenate([shorter[:5], longer[-4:]])):
        states, after = (jax.tree.map(lambda x, at=at: x[at, 0], before) for at in (rows, rows + 1))
        y, new = step(states, *jax.tree.map(lambda x, at=rows: x[0, at], (q, k, v, gates)))
        assert_close(y, expected[0, rows], EXACT)
        assert_close(new, after, EXACT)


@each_name(
    ["titans", "omeganet_window_over_chunk", "atlas_every", "swla", "delta_rule", "deep_small"],
    slow=["titans", "omeganet_window_over_chunk", "atlas_every"],
)
def test_gradients_through_a_stream(name, x64):
    """Four calls, cut in the middle of chunks, have the gradients of one."""
    rule = RULES[name]
    args = make_inputs(rule, batch=1, time=24, dtype=jnp.float64)
    weights = np.cos(np.arange(24 * 2 * 4)).reshape(1, 24, 2, 4)

    def whole(params, q, k, v, gates):
        return jnp.sum(weights * memory.reference(rule, params, None, q, k, v, gates)[0])

    def cut(params, *inputs):
        def call(state, piece):
            y, state = memory.scan(rule, params, state, *piece)
            return state, y

        # All calls are of one shape, so that they are compiled once.
        pieces = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(1, 4, 6, *x.shape[2:]), 1, 0), inputs)
        _, y = jax.lax.scan(call, memory.init_state(rule, params, batch_size=1), pieces)
        return jnp.sum(weights * jnp.moveaxis(y, 0, 1).reshape(weights.shape))

    argnums = (0, 1, 2, 3, 4)
    assert_close(jax.jit(jax.grad(cut, argnums))(*args), jax.jit(jax.grad(whole, argnums))(*args), EXACT)


SEGMENTS = np.array([[0] * 9 + [1] * 1 + [2] * 13 + [7] * 15, [3] * 38, [0, 1, 2, 3] * 2 + [4] * 30])


# One of every engine, with and without window, momentum, and places in a chunk.
SEGMENTED = [
    "linear_attention", "delta_rule", "delta_rule_decay", "gla", "channel_delta_momentum", "ttt_linear", "titans",
    "titans_long_chunk", "omeganet_window_over_chunk", "yaad_window", "atlas_every", "atlas_online",
    "write_gate_channel_window", "write_gate_map", "titans_write_gate", "momentum_delta",
]  # fmt: skip


@each_name(
    SEGMENTED,
    slow=set(SEGMENTED)
    - {"delta_rule", "channel_delta_momentum", "omeganet_window_over_chunk", "write_gate_map", "momentum_delta"},
)
def test_segments(name, x64):
    """Packed segments equal the reference, which resets by definition; with a stream cut inside a segment."""
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, batch=3, time=38, dtype=jnp.float64)
    ids = jnp.asarray(SEGMENTS)
    expected, final = jax.jit(lambda: memory.reference(rule, params, None, q, k, v, gates, segment_ids=ids))()
    packed = jax.jit(lambda ids: memory.scan(rule, params, None, q, k, v, gates, segment_ids=ids, max_segments=9))
    y, state = packed(ids)
    assert_close(y, expected, EXACT)
    assert_close(state.memory, final.memory, EXACT)
    np.testing.assert_array_equal(state.segment, SEGMENTS[:, -1])

    outputs = []
    state = jax.tree.map(lambda x, like: x.astype(like.dtype), memory.init_state(rule, params, batch_size=3), state)
    for start, stop in ((0, 19), (19, 38)):  # both of one shape
        piece = jax.tree.map(lambda x, a=start, b=stop: x[:, a:b], (q, k, v, gates))
        y, state = memory.scan(rule, params, state, *piece, segment_ids=ids[:, start:stop], max_segments=9)
        outputs.append(y)
    assert_close(jnp.concatenate(outputs, axis=1), expected, EXACT, what="stream")
    assert_close(state.memory, final.memory, EXACT, what="stream")
    if rule.window > 1:
        np.testing.assert_array_equal(state.window_count, final.window_count)


@each_name(["titans", "omeganet", "atlas", "muon_matrix_channel"], slow=["titans", "atlas", "omeganet"])
def test_packed_equals_alone(name, x64):
    """A packed segment gives what it gives as a sequence of its own; and gradients stay inside."""
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, batch=1, time=38, dtype=jnp.float64)
    ids = jnp.asarray(SEGMENTS[:1])

    def third(k):
        packed, _ = memory.scan(rule, params, None, q, k, v, gates, segment_ids=ids)
        return packed[:, 10:23].sum(), packed

    (_, packed), gradient = jax.jit(jax.value_and_grad(third, has_aux=True))(k)
    run = jax.jit(lambda *piece: memory.scan(rule, params, None, *piece)[0])
    for start, stop in ((0, 9), (9, 10), (10, 23), (23, 38)):
        # What follows a segment changes nothing in it (`test_causality`), so that all pieces are of one shape.
        piece = jax.tree.map(
            lambda x, a=start, b=stop: jnp.concatenate([x[:, a:b], x[:, : a + 15 - b]], 1), (q, k, v, gates)
        )
        assert_close(packed[:, start:stop], run(*piece)[:, : stop - start], EXACT)
    gradient = np.abs(np.asarray(gradient)).sum((0, 2, 3))
    assert (gradient[:10] == 0).all()
    assert (gradient[23:] == 0).all()
    assert (gradient[10:23] > 0).all()


def test_too_many_segments_are_loud():
    rule = RULES["titans_matrix"]
    params, q, k, v, gates = make_inputs(rule, batch=1)
    packed = jax.jit(lambda ids: memory.scan(rule, params, None, q, k, v, gates, segment_ids=ids, max_segments=2))
    y, state = packed(jnp.arange(37)[None])
    assert np.isnan(np.asarray(y)).any()
    assert np.isnan(np.asarray(state.memory["W"])).all()
    with pytest.raises(ValueError, match="max_segments=2, but segment_ids has a row with 37"):
        memory.scan(rule, params, None, q, k, v, gates, segment_ids=jnp.arange(37)[None], max_segments=2)


@each_name(["titans", "omeganet", "atlas"], slow=["titans", "omeganet"])
def test_state_size_does_not_depend_on_what_was_read(name):
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, time=50)
    fresh = memory.init_state(rule, params, batch_size=2)
    _, state = jax.eval_shape(lambda state: memory.scan(rule, params, state, q, k, v, gates), fresh)
    chex.assert_trees_all_equal_shapes_and_dtypes(fresh, state)


@each_name(["titans", "omeganet", "atlas", "gla", "yaad_window"], slow=["titans", "yaad_window", "omeganet"])
def test_state_can_be_donated(name):
    """No two leaves share a buffer: a stream can give its state away at every call."""
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, time=12)
    run = jax.jit(lambda state: memory.scan(rule, params, state, q, k, v, gates)[1], donate_argnums=0)
    state = run(run(memory.init_state(rule, params, batch_size=2)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    params, state = jax.jit(lambda p: (p, memory.init_state(rule, p, batch_size=2)))(params)
    run(state)
