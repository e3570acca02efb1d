"""The library under JAX's flags that a program may set for all of its code. Everything is traced, nothing compiled.

- `jax_numpy_dtype_promotion="strict"`: no operation mixes dtypes. bfloat16 tokens meet float32 gates and memories everywhere.
- `jax_numpy_rank_promotion="raise"`: no operation mixes arrays of different numbers of axes.
- `jax_enable_x64`: what is created without a dtype is float64. Parameters, states and outputs have the dtypes they have without it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from atlasjax import memory, rules
from atlasjax.nn.mixers import MIXERS
from atlasjax.train import state as state_lib
from atlasjax.train.step import accumulated_gradients
from experiments.packing.models import small
from tests.marks import each_name

BATCH, TIME, HEADS, DIM = 2, 12, 2, 4

RULES = {
    **rules.REGISTRY,
    "titans": lambda: rules.titans(chunk_size=8),
    "atlas": lambda: rules.atlas(chunk_size=4, window=2),
    "swdt": lambda: rules.swdt(chunk_size=8, cache_window=8),
    "cached": lambda: memory.CachedRule(rules.gated_delta_rule(), segment_size=4, aggregation="ssc", top_k=2),
    "soup": lambda: memory.CachedRule(rules.titans(chunk_size=4), segment_size=4, aggregation="soup"),
    "log-linear": lambda: memory.LogLinearRule(rules.gla(chunk_size=4), segment_size=4),
}
# One of each way in which a memory is computed. The others run with `-m slow`.
QUICK_RULES = ("gated_delta_rule", "titans", "swdt")
QUICK_MIXERS = ("attention", "mamba", "memorizing")

array = jax.ShapeDtypeStruct
strict = lambda: jax.numpy_dtype_promotion("strict")
same_rank = lambda: jax.numpy_rank_promotion("raise")


def dtypes(tree):
    return {jax.tree_util.keystr(path): x.dtype for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def trace_rule(name, dtype):
    """Everything that `atlasjax.memory` does with a rule. The dtypes of all results by their paths."""
    rule, sizes = RULES[name](), {"num_heads": HEADS, "key_dim": DIM, "value_dim": DIM}
    q, token = array((BATCH, TIME, HEADS, DIM), dtype), array((BATCH, HEADS, DIM), dtype)
    gates, gate = (
        jax.eval_shape(lambda time=time: memory.suggested_gates(rule, batch_size=BATCH, time=time, **sizes))
        for time in (TIME, None)
    )
    params = jax.eval_shape(lambda key: memory.init_params(rule, key, **sizes), jax.random.key(0))
    state = jax.eval_shape(lambda params: memory.init_state(rule, params, batch_size=BATCH, max_length=32), params)
    scan = lambda params, state, q, gates, ids=None: memory.scan(
        rule, params, state, q, q, q, gates, segment_ids=ids, max_segments=None if ids is None else 2
    )
    total = lambda *x: jnp.sum(scan(*x)[0].astype(jnp.float32))
    whole = params, None, q, gates
    stream = params, state, q, gates
    packed = params, state if rule.segments_continue else None, q, gates, array((BATCH, TIME), jnp.int32)
    found = {
        "params": params,
        "gates": gates,
        "state": state,
        "whole": jax.eval_shape(scan, *whole),
        "stream": jax.eval_shape(scan, *stream),
        "gradient": jax.eval_shape(jax.grad(total, argnums=(0, 2, 3)), *packed),
        "step": jax.eval_shape(lambda *x: memory.step(rule, *x[:2], *[x[2]] * 3, x[3]), params, state, token, gate),
        "read": jax.eval_shape(lambda *x: memory.read(rule, *x[:3], connector=x[3]), params, state, q, gates.connector),
    }
    return dtypes(found)


def config_of(mixer):
    """One small layer, bfloat16, which is the default."""
    return dataclasses.replace(small("transformer++-tiny"), mixer=mixer, num_layers=1, num_heads=2, dtype="bfloat16")


def trace_start(mixer):
    """A model's definition, parameters and fresh state."""
    graphdef, params = state_lib.model_shapes(config_of(mixer))
    cache = jax.eval_shape(lambda params: state_lib.merge(graphdef, params).init_cache(BATCH, 32), params)
    return graphdef, params, cache


def trace_model(mixer):
    """The gradient of a loss, and the outputs and states for a piece and a token of a stream, of a model of one layer."""
    graphdef, params, cache = trace_start(mixer)
    ids = lambda time: array((BATCH, time), jnp.int32)
    batch = {"inputs": ids(TIME), "targets": ids(TIME), "weights": array((BATCH, TIME), jnp.float32)}
    extend = lambda params, tokens, cache: state_lib.merge(graphdef, params).extend(tokens, cache)
    packed = batch | {"segment_ids": ids(TIME)}
    found = {
        "params": params,
        "gradient": jax.eval_shape(lambda *x: accumulated_gradients(graphdef, *x, 1), params, batch),
        "packed": jax.eval_shape(lambda *x: accumulated_gradients(graphdef, *x, 1, max_segments=2), params, packed),
        "cache": cache,
        "extend": jax.eval_shape(extend, params, ids(TIME), cache),
        "one token": jax.eval_shape(extend, params, ids(1), cache),
    }
    return dtypes(found)


each_rule = each_name(RULES, set(RULES) - set(QUICK_RULES))
each_mixer = each_name(MIXERS, set(MIXERS) - set(QUICK_MIXERS))


@each_rule
def test_rules_mix_no_dtypes(name):
    with strict():
        trace_rule(name, jnp.bfloat16)


@each_rule
def test_rules_mix_no_ranks(name):
    with same_rank():
        trace_rule(name, jnp.float32)


@each_name(RULES, set(RULES) - {"gated_delta_rule"})
def test_rules_have_the_same_dtypes_in_64_bits(name):
    expected = trace_rule(name, jnp.float32)
    with jax.enable_x64(True):
        assert trace_rule(name, jnp.float32) == expected


def test_a_memory_of_64_bits_is_computed_in_64_bits():
    rule, sizes = rules.gated_delta_rule(), {"num_heads": HEADS, "key_dim": DIM, "value_dim": DIM}

    def run(key, q):
        gates = memory.suggested_gates(rule, batch_size=BATCH, time=TIME, **sizes)
        params, gates = jax.tree.map(lambda x: x.astype(q.dtype), (memory.init_params(rule, key, **sizes), gates))
        y, state = memory.scan(rule, params, None, q, q, q, gates)
        return y, state.memory, memory.read(rule, params, state, q)

    with jax.enable_x64(True):
        found = jax.eval_shape(run, jax.random.key(0), array((BATCH, TIME, HEADS, DIM), jnp.float64))
    assert set(dtypes(found).values()) == {jnp.dtype(jnp.float64)}


@pytest.mark.parametrize("name", MIXERS)
def test_parameters_and_states_of_models_are_no_wider_in_64_bits(name):
    expected = dtypes(trace_start(name)[1:])
    with jax.enable_x64(True):
        assert dtypes(trace_start(name)[1:]) == expected


@each_mixer
def test_models_mix_no_dtypes(name):
    with strict():
        trace_model(name)


@each_mixer
def test_models_mix_no_ranks(name):
    with same_rank():
        trace_model(name)


@each_mixer
def test_models_have_the_same_dtypes_in_64_bits(name):
    expected = trace_model(name)
    with jax.enable_x64(True):
        assert trace_model(name) == expected
