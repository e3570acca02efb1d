"""Packed segments by kernels, in interpret mode, against the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from atlasjax.memory import structures
from atlasjax.memory.fast_weights import kernels, linear_kernels, linear_pass
from pallas_kernels.arguments import Segments
from pallas_kernels.delta_rule import delta_rule
from tests.marks import if_slow
from tests.memory.cases import RULES, assert_close, make_inputs, objective


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for module, name in (
        (kernels, "chunk_memory"), (linear_kernels, "delta_rule"), (linear_kernels, "linear_rule"), (linear_pass, "memory_pass"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=True))
    # Several chunks in a few tokens.
    monkeypatch.setattr(kernels, "_FREE_CHUNK", 16)


# Segments of one token, of exactly one chunk of 8 and of 16, ids without a token, and an id that returns.
SEGMENTS = np.stack(
    [
        np.repeat([0, 1, 2, 5, 6, 2], [1, 8, 16, 3, 1, 8]),
        np.repeat([4, 7, 8], [20, 1, 16]),
    ]
)
TIME = SEGMENTS.shape[1]
IDS = jnp.asarray(SEGMENTS, jnp.int32)


def gradients(fn, rule, **options):
    """Outputs, state and gradients of all arguments; the initial memory is not zero."""
    if fn is memory.scan:
        options["max_segments"] = 7  # a bound that is not reached
    fn = functools.partial(fn, segment_ids=IDS, **options)
    return jax.jit(jax.value_and_grad(functools.partial(objective, fn, rule), argnums=(0, 1, 2, 3, 4), has_aux=True))


def inputs(rule, **options):
    return make_inputs(rule, batch=2, time=TIME, **options)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize("name", ["gated_delta_rule", if_slow("delta_rule"), if_slow("longhorn")])
def test_delta_rule(name, implementation):
    rule = RULES[name]
    args = inputs(rule)
    found = gradients(memory.scan, rule, implementation=implementation)(*args)
    assert_close(found, gradients(memory.reference, rule)(*args), 2e-5)


@pytest.mark.parametrize(
    "name", ["rwkv7", "comba", *map(if_slow, ("gdn2", "gla", "rwkv7_one_key", "delta_rule_decay"))]
)
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_linear_rules(name, implementation):
    rule = RULES[name]
    args = inputs(rule)
    found = gradients(memory.scan, rule, implementation=implementation)(*args)
    assert_close(found, gradients(memory.reference, rule)(*args), 2e-5)


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        ("pallas_tpu", jnp.bfloat16, 0.03),
        if_slow("pallas_tpu", jnp.float32, 2e-5),
        if_slow("pallas_gpu", jnp.bfloat16, 0.03),
        if_slow("pallas_gpu", jnp.float32, 2e-5),
    ],
)
def test_bfloat16_and_wide_chunks(implementation, dtype, tolerance, monkeypatch):
    """Chunks of 64 tokens, which the GPU kernels split; bfloat16 against the XLA engine, whose products are also in bfloat16."""
    monkeypatch.setattr(kernels, "_FREE_CHUNK", 64)
    rule = RULES["gated_delta_rule"]
    args = inputs(rule, dtype=dtype)
    found = gradients(memory.scan, rule, implementation=implementation)(*args)
    assert_close(found, gradients(memory.reference, rule)(*args), tolerance)


# Windows, momentum, features with a residual outside the kernel, norms that act, two layers, and Muon.
DEEP = [
    if_slow("titans_at_its_limits", "pallas_tpu"),  # test_chunk_memory_segments.py has the kernels
    ("swla", "pallas_tpu"),  # chunks have no effect
    if_slow("omeganet", "pallas_gpu"),
    if_slow("omeganet", "pallas_tpu"),
    if_slow("titans", "pallas_tpu"),
    if_slow("yaad", "pallas_tpu"),
    if_slow("yaad", "pallas_gpu"),
    if_slow("titans_at_its_limits", "pallas_gpu"),
    if_slow("swla", "pallas_gpu"),
    if_slow("momentum_full_retention", "pallas_tpu"),
    if_slow("gated", "pallas_tpu"),
    if_slow("titans_write_gate", "pallas_tpu"),
    if_slow("titans_write_gate", "pallas_gpu"),
    if_slow("ttt_mlp", "pallas_tpu"),  # with a LayerNorm inside
]


def rule_for(name, implementation):
    rule = RULES[name]
    if implementation == "pallas_gpu" and rule.bound is not None:
        rule = dataclasses.replace(rule, chunk_size=16, structure=structures.Matrix())
    return rule


@pytest.mark.parametrize(("name", "implementation"), DEEP)
def test_chunkwise_memories(name, implementation):
    rule = rule_for(name, implementation)
    args = inputs(rule)
    found = gradients(memory.scan, rule, implementation=implementation)(*args)
    assert_close(found, gradients(memory.reference, rule)(*args), 2e-5)


@pytest.mark.slow  # by default the kernels themselves, in tests/pallas_kernels/test_chunk_memory_segments.py
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_muon(implementation):
    rule = dataclasses.replace(RULES["atlas"], structure=structures.Matrix(), chunk_size=8)
    rule = dataclasses.replace(rule, chunk_size=16) if implementation == "pallas_gpu" else rule
    args = inputs(rule)
    found = gradients(memory.scan, rule, implementation=implementation)(*args)
    assert_close(found, gradients(memory.reference, rule)(*args), 2e-3)


@functools.partial(jax.jit, static_argnames=("rule", "implementation", "max_segments"))
def continued(rule, implementation, params, state, tokens, ids, max_segments):
    return memory.scan(
        rule, params, state, *tokens, segment_ids=ids, max_segments=max_segments, implementation=implementation
    )


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        if_slow("titans_at_its_limits", False),
        ("momentum_full_retention", True),
        if_slow("omeganet", True),
        if_slow("titans_at_its_limits", True),
        if_slow("swla", True),
    ],
)
def test_deep_memories_go_on_from_a_state(name, packed):
    """At every offset in a chunk of 8; with segments, the first one of a row goes on or begins, and may end in the chunk."""
    rule = RULES[name]
    params, *tokens = inputs(rule)
    cut = lambda which: jax.tree.map(lambda x: x[:, which], tokens)
    ids = (lambda which: IDS[:, which]) if packed else lambda which: None
    most = 7 if packed else None
    expected = memory.scan(rule, params, None, *tokens, segment_ids=ids(slice(None)), max_segments=most)
    state, length = memory.init_state(rule, params, batch_size=2), 16
    for split in range(1, TIME - length):
        last, rest = slice(split - 1, split), slice(split, split + length)
        _, state = continued(rule, "xla", params, state, cut(last), ids(last), most)
        found = continued(rule, "pallas_tpu", params, state, cut(rest), ids(rest), most)
        assert_close(found, continued(rule, "xla", params, state, cut(rest), ids(rest), most), 2e-5)
        assert_close(found[0], expected[0][:, rest], 2e-5)


@pytest.mark.slow  # test_kernels_inside_mac has gradients through the states of several calls
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_through_a_stream(packed):
    """Of the state that the second call goes on from, inside a chunk and a window."""
    rule = dataclasses.replace(RULES["momentum_full_retention"], structure=structures.Matrix())
    params, *tokens = inputs(rule)
    ids = (lambda which: {"segment_ids": IDS[:, which], "max_segments": 7}) if packed else lambda which: {}

    def loss(implementation, params, tokens):
        cut = lambda which: jax.tree.map(lambda x: x[:, which], tokens)
        first, rest = slice(12), slice(12, None)
        _, state = memory.scan(rule, params, None, *cut(first), **ids(first))
        y, state = memory.scan(rule, params, state, *cut(rest), **ids(rest), implementation=implementation)
        leaves = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(jnp.sin(x)) for x in leaves), jnp.sum(jnp.cos(y)))

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, name), argnums=(0, 1)))(params, tokens)
        for name in ("pallas_tpu", "xla")
    )
    assert_close(found, expected, 2e-5)


def test_goes_on_from_a_state():
    """The first segment of a row goes on if its id is the state's, else it begins with the initial memory."""
    rule = RULES["gated_delta_rule"]
    params, *tokens = inputs(rule)
    cut = lambda which: jax.tree.map(lambda x: x[:, which], tokens)
    for split in (20, 25):  # within a segment of the second row, and of the first
        _, state = memory.scan(rule, params, None, *cut(slice(split)), segment_ids=IDS[:, :split], max_segments=7)
        rest = {"segment_ids": IDS[:, split:], "max_segments": 4}
        found = memory.scan(rule, params, state, *cut(slice(split, None)), **rest, implementation="pallas_tpu")
        assert_close(found, memory.scan(rule, params, state, *cut(slice(split, None)), **rest), 2e-5)


def test_too_many_segments():
    """As in the XLA engine, the memory is NaN."""
    rule = RULES["gated_delta_rule"]
    ids = jnp.tile(jnp.arange(TIME), (2, 1))
    call = functools.partial(memory.scan, rule, max_segments=1, implementation="pallas_tpu")
    params, *tokens = inputs(rule)
    y, state = jax.jit(lambda ids: call(params, None, *tokens, segment_ids=ids))(ids)
    assert jnp.all(jnp.isnan(state.memory["W"]))
    assert jnp.all(jnp.isnan(y[:, -1]))
    assert jnp.all(jnp.isfinite(y[:, 0]))


def test_chunks_that_a_gpu_cannot_restart_are_refused():
    q, beta = jnp.zeros((1, 16, 2, 8)), jnp.zeros((1, 16, 2))
    segments = Segments(jnp.ones((1, 2), jnp.int32), jnp.zeros((2, 8, 8)), jnp.ones((1, 16)))
    with pytest.raises(ValueError, match="chunk_size=8, must be at least 16 with segments on a GPU"):
        delta_rule(q, q, q, beta, chunk_size=8, segments=segments, implementation="pallas_gpu")
