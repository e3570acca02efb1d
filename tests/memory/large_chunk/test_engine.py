"""The engine of large-chunk memories against the definition: values, gradients, every split, packed segments, bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from atlasjax.memory import LargeChunkRule, objectives, structures
from atlasjax.memory.large_chunk import scan
from tests.memory.cases import assert_close, check_every_split, graded
from tests.memory.large_chunk.cases import RULES, make_inputs

EXACT = 1e-9
IDS = jnp.asarray([[0] * 9 + [1] * 2 + [2] * 12, [3] * 16 + [4] * 7])


@pytest.mark.parametrize("name", RULES)
def test_values_and_gradients(name, x64):
    rule = RULES[name]
    inputs = make_inputs(rule)
    found, expected = (graded(fn, rule, *inputs) for fn in (memory.scan, memory.reference))
    assert_close((found[0][1], found[1]), (expected[0][1], expected[1]), EXACT)


@pytest.mark.parametrize("name", RULES)
def test_every_split(name, x64):
    rule, time, piece = RULES[name], 23, 9
    params, *tokens = make_inputs(rule, batch=1, time=time)
    state = memory.init_state(rule, params, batch_size=1)
    starts, states, _, expected = check_every_split(rule, params, tokens, state, None, piece, EXACT)
    # A read sees what the next token does.
    nexts = jax.jit(lambda: memory.read(rule, params, states, tokens[0][0][starts][:, None]))()
    assert_close(nexts[:, 0], expected[0][starts], EXACT)


@pytest.mark.parametrize("name", ["lact", "matrix"])
def test_packed_segments(name, x64, monkeypatch):
    """Each is as if alone. Pieces are shorter than chunks, as for the chunks of models, and a call may go on with a segment."""
    monkeypatch.setattr(scan, "_LEAST", 2)
    monkeypatch.setattr(scan, "_MOST", 3)
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule)
    reference = jax.jit(lambda *x: memory.reference(rule, params, None, *x, segment_ids=IDS))
    expected, last = reference(q, k, v, gates)
    packed = jax.jit(lambda state, ids, *x: memory.scan(rule, params, state, *x, segment_ids=ids, max_segments=3))
    assert_close(packed(None, IDS, q, k, v, gates), (expected, last), EXACT)
    cut = lambda start, stop: jax.tree.map(lambda x: x[:, start:stop], (IDS, q, k, v, gates))
    first, state = packed(None, *cut(0, 8))
    rest, after = packed(state, *cut(8, 23))
    assert_close((jnp.concatenate([first, rest], axis=1), after), (expected, last), EXACT)
    gradient = lambda fn: jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(fn(*x)[0])), argnums=(0, 1, 2, 3)))(
        q, k, v, gates
    )
    definition = lambda *x: memory.reference(rule, params, None, *x, segment_ids=IDS)
    assert_close(gradient(lambda *x: packed(None, IDS, *x)), gradient(definition), EXACT)


def test_too_many_segments_are_nan(x64):
    rule = RULES["matrix"]
    params, q, k, v, gates = make_inputs(rule)
    ids = jnp.broadcast_to(jnp.arange(23), (2, 23))
    packed = jax.jit(lambda ids: memory.scan(rule, params, None, q, k, v, gates, segment_ids=ids, max_segments=2))
    y, state = packed(ids)
    assert np.isnan(y).any()
    assert np.isnan(state.memory["W"]).all()


def test_pieces_of_packed_segments_divide_the_chunk():
    assert [scan.piece_size(chunk) for chunk in (1, 40, 64, 500, 2048, 4096, 257)] == [1, 40, 64, 250, 256, 256, 257]


def test_bfloat16():
    """Products are in the dtype of the tokens, states in float32."""
    rule = LargeChunkRule(chunk_size=8, momentum=True)
    params, q, k, v, gates = make_inputs(rule, time=30, dtype=jnp.bfloat16)
    y, state = memory.scan(rule, params, None, q, k, v, gates)
    assert y.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert_close((y, state), memory.reference(rule, params, None, q, k, v, gates), 3e-2)


def test_truncation_leaves_values_alone(x64):
    rule = RULES["lact"]
    params, *tokens = make_inputs(rule)
    whole = memory.scan(rule, params, None, *tokens)
    assert_close(memory.scan(rule, params, None, *tokens, truncation=12), whole, EXACT)


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    rule = RULES["lact"]
    params, *tokens = make_inputs(rule, dtype=jnp.float32)
    expected = jax.jit(lambda *x: memory.scan(rule, x[0], None, *x[1:]))(params, *tokens)
    put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    params = jax.tree.map(lambda x: put(x, ["tensor"]), params)
    tokens = jax.tree.map(lambda x: put(x, ["data", None, "tensor"]), tokens)
    assert_close(jax.jit(lambda *x: memory.scan(rule, x[0], None, *x[1:]))(params, *tokens), expected, 1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LargeChunkRule(chunk_size=0), "LargeChunkRule: chunk_size must be an integer ≥ 1, got 0"),
        (lambda: LargeChunkRule(schedule="lactt"), "Unknown Newton–Schulz schedule 'lactt'. Did you mean 'lact'"),
        (lambda: LargeChunkRule(momentum=1), "LargeChunkRule: momentum"),
        (lambda: LargeChunkRule(objective=objectives.DeltaKeys()), "must be one that writes at the key alone"),
        (lambda: LargeChunkRule(structures.SwiGLU), "Give an instance, SwiGLU"),
        (lambda: memory.CachedRule(LargeChunkRule()), "rule must be a MemoryRule"),
    ],
)
def test_refuses_choices(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refuses_calls():
    rule = RULES["lact"]
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float32)
    call = lambda gates, **options: memory.scan(rule, params, None, q, k, v, gates, **options)
    with pytest.raises(ValueError, match=r"gates.step_size has shape \(2, 23, 2, 2\), must be \[2, 23, 2, 3\]"):
        call(gates._replace(step_size=gates.step_size[..., :2]))
    with pytest.raises(ValueError, match=r"gates\.momentum_decay is missing"):
        call(gates._replace(momentum_decay=None))
    with pytest.raises(ValueError, match="there are no kernels for a LargeChunkRule"):
        call(gates, implementation="pallas_tpu")
    other = memory.init_state(RULES["sums"], make_inputs(RULES["sums"], dtype=jnp.float32)[0], batch_size=2)
    with pytest.raises(ValueError, match="state belongs to another rule"):
        memory.scan(rule, params, other, q, k, v, gates)
    params = make_inputs(RULES["sums"], dtype=jnp.float32)[0]
    beyond = other._replace(position=other.position + RULES["sums"].chunk_size)
    with pytest.raises(ValueError, match=r"state.position has the value \d+, must be in \[0, \d+\]"):
        memory.read(RULES["sums"], params, beyond, q)
