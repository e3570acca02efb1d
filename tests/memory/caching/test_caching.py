"""Memory Caching: the fast forms against the definition, the identities of SEMANTICS section 4, and what must be refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import CachedRule, MemoryRule, SoftmaxRule, objectives, optimizers, retention, structures
from tests.marks import some_slow
from tests.memory.cases import RULES, assert_close, slice_time
from tests.memory.cases import make_inputs as plain_inputs
from tests.memory.own_ideas import IDEAS
from tests.memory.softmax.cases import make_inputs as softmax_inputs

EXACT = 1e-9
TIME, PIECE, SIZE = 15, 6, 4
TITANS = rules.titans(2, structures.MLP(expansion=2)).unbounded()
OMEGA = rules.omeganet(4, window=3, structure=structures.MLP(expansion=1))
ATLAS = rules.atlas(4, 3, structures.MLP(expansion=1), RULES["omeganet_powers"].features, newton_schulz_every=2)

# Each aggregation with each gate, start and kind of memory at least once; the window of `OMEGA` reaches over its segment's start.
CASES = {
    "residual": CachedRule(rules.linear_attention(), "residual", SIZE),
    "residual_titans": CachedRule(TITANS, "residual", SIZE, capacity=1),
    "grm": CachedRule(TITANS, "grm", SIZE),
    "grm_sigmoid_sum": CachedRule(rules.delta_rule(), "grm", SIZE, gate="sigmoid", pooling="sum", connector="query"),
    "grm_carry_capacity": CachedRule(OMEGA, "grm", SIZE, start="carry", capacity=2),
    "grm_raw_decay": CachedRule(rules.gla(), "grm", 3, gate="raw", start="carry"),
    "soup": CachedRule(TITANS, "soup", SIZE),
    "soup_small": CachedRule(
        MemoryRule(structures.MLP(expansion=1), optimizer=optimizers.GradientDescent(), chunk_size=2, bound=None),
        "soup",
        SIZE,
        stop_gradient=True,
        blended=True,
    ),
    "soup_carry": CachedRule(OMEGA, "soup", SIZE, gate="sigmoid", start="carry", capacity=2),
    "soup_matrix": CachedRule(rules.gated_delta_rule(), "soup", 5, gate="raw"),
    "soup_norm": CachedRule(rules.ttt_mlp(2, expansion=1), "soup", SIZE, stop_gradient=True),
    "ssc": CachedRule(TITANS, "ssc", 2),
    "ssc_one": CachedRule(rules.retnet(), "ssc", 3, top_k=1, capacity=2, start="carry", blended=True),
    "ssc_ones_age": CachedRule(rules.retnet(), "ssc", 3, top_k=1, capacity=2, gate="ones", connector="age"),
    "grm_age": CachedRule(TITANS, "grm", SIZE, capacity=2, connector="age"),
    "grm_ones": CachedRule(TITANS, "grm", SIZE, gate="ones"),
    "ssc_atlas": CachedRule(ATLAS, "ssc", SIZE, gate="sigmoid"),
    "grm_own_optimizer": CachedRule(dataclasses.replace(IDEAS["own_adam"], chunk_size=2), "grm", SIZE),
    "grm_map": CachedRule(rules.memora(2, structures.MLP(expansion=1)), "grm", SIZE),
}
# Softmax memories: windows over the segment's start, momentum, caches shorter than a segment, chunks of one segment and less.
ATTENTION = SoftmaxRule(structures.Matrix(), retention=retention.Full())
SMALL_MLP = structures.MLP(expansion=1)
CASES |= {
    "residual_attention": CachedRule(ATTENTION, "residual", SIZE),
    "grm_deep_transformer": CachedRule(SoftmaxRule(SMALL_MLP, chunk_size=2), "grm", SIZE, stop_gradient=True),
    "grm_raw_swdt": CachedRule(
        SoftmaxRule(SMALL_MLP, cache_window=3, chunk_size=4), "grm", SIZE, gate="raw", capacity=2
    ),
    "ssc_dot": CachedRule(
        SoftmaxRule(SMALL_MLP, objectives.L2(), optimizers.Momentum(), window=3, chunk_size=2), "ssc", SIZE, top_k=1
    ),
    "grm_delta_kernel": CachedRule(
        SoftmaxRule(structures.Matrix(), objectives.L2(), window=2, normalized=False, chunk_size=1),
        "grm",
        5,
        gate="sigmoid",
    ),
}
IDS = jnp.array([[0] * 6 + [1] * 9, [2] * 5 + [3] * 3 + [4] * 7])


def make_inputs(rule, *, time=TIME, batch=2, heads=2, dim=4, dtype=jnp.float64, seed=0):
    """(params, q, k, v, gates) of a cached rule; scores of different sizes, so that no order of memories is a tie."""
    inputs = softmax_inputs if isinstance(rule.rule, SoftmaxRule) else plain_inputs
    params, q, k, v, gates = inputs(
        rule.rule, batch=batch, time=time, heads=heads, key_dim=dim, value_dim=dim, dtype=dtype, seed=seed
    )
    channels = rule.connector_channels(dim)
    if channels is not None:
        u = np.random.default_rng(seed + 1).standard_normal((*q.shape[:-1], channels))
        gates = gates._replace(connector=jnp.asarray(3 * u, jnp.promote_types(dtype, jnp.float32)))
    if rule.blended:
        blend = np.random.default_rng(seed + 2).uniform(-0.5, 1.5, q.shape[:-1])
        gates = gates._replace(blend=jnp.asarray(blend, jnp.promote_types(dtype, jnp.float32)))
    return params, q, k, v, gates


def outputs(fn, rule, *args, **kwargs):
    return fn(rule, args[0], None, *args[1:], **kwargs)[0]


def run(fn, rule, *args):
    return jax.jit(lambda *args: outputs(fn, rule, *args))(*args)


# What runs by default; `test_every_choice_is_compared` says what of it is in each list.
GRADED = {"grm_sigmoid_sum", "soup_small", "soup_matrix", "ssc_one", "ssc_ones_age", "residual_attention"}
PACKED = {"residual", "grm_sigmoid_sum", "soup_small", "soup_matrix", "ssc_one", "ssc_ones_age", "grm_delta_kernel"}
SPLIT = PACKED


def each_case(cases, default):
    return pytest.mark.parametrize("name", some_slow(cases, set(cases) - default))


def choices(rule):
    """Every choice by itself, and the kind of the memory with the aggregation's."""
    fields = "aggregation", "gate", "connector", "pooling", "start", "blended"
    chosen = {(field, getattr(rule, field)) for field in fields} | {("capacity", rule.capacity is None)}
    return chosen | {("mixes", rule.aggregation, rule.mixes_weights), ("softmax", isinstance(rule.rule, SoftmaxRule))}


def test_every_choice_is_compared():
    every = set().union(*map(choices, CASES.values()))
    for names in (GRADED, PACKED, SPLIT):
        assert set().union(*(choices(CASES[name]) for name in names)) == every
    assert any(CASES[name].stop_gradient for name in GRADED)


@each_case(CASES, default=GRADED)
def test_outputs_and_gradients(name, x64):
    rule = CASES[name]
    args = make_inputs(rule)
    weights = np.cos(np.arange(TIME * 2 * 2 * 4)).reshape(2, TIME, 2, 4)
    results = []
    for fn in (memory.reference, memory.scan):
        total = lambda *args, fn=fn: (jnp.sum(weights * (y := outputs(fn, rule, *args))), y)
        results.append(jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4), has_aux=True))(*args))
    assert_close(results[1], results[0], EXACT)


@each_case(CASES, default=PACKED)
def test_packed_documents(name, x64):
    """Every document is as if alone, and the last one's memory can go on."""
    rule = CASES[name]
    args = make_inputs(rule)
    y, state = jax.jit(lambda *args: memory.scan(rule, args[0], None, *args[1:], segment_ids=IDS, max_segments=4))(
        *args
    )
    want = jax.jit(lambda *args: outputs(memory.reference, rule, *args, segment_ids=IDS))(*args)
    assert_close(y, want, EXACT)
    tail = jax.tree.map(lambda x: x[1:, 8:], args[1:])
    _, alone = jax.jit(lambda *tail: memory.scan(rule, args[0], None, *tail))(*tail)
    online = lambda s: s._replace(segment=s.position) if isinstance(rule.rule, SoftmaxRule) else s.memory
    own = lambda s: (online(s.online), s.key_sum, s.position, s.cached_count)
    assert_close(jax.tree.map(lambda x: x[1:], own(state)), own(alone), EXACT)
    connector = None if args[4].connector is None else args[4].connector[:, -1:]
    blend = None if args[4].blend is None else args[4].blend[:, -1:]
    read = memory.read(rule, args[0], state, args[1][:, -1:], connector, blend)
    assert_close(read, y[:, -1:], EXACT, "read of the state")


@each_case(CASES, default=SPLIT)
def test_every_split(name, x64):
    """One token at a time equals the whole; a call that begins after ANY number of tokens goes on exactly."""
    rule = CASES[name]
    params, *arrays = make_inputs(rule, batch=1)
    expected, final = jax.jit(lambda *a: memory.scan(rule, params, None, *a))(*arrays)
    state = memory.init_state(rule, params, batch_size=1, max_length=TIME)
    state = jax.tree.map(lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def body(state, xs):
        y, new = memory.step(rule, params, state, *xs)
        return new, (y, state)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tuple(arrays))
    last, (y, before) = jax.jit(lambda tokens: jax.lax.scan(body, state, tokens))(tokens)
    assert_close(jnp.moveaxis(y, 0, 1), expected, EXACT, "steps")
    assert_close(last, final, EXACT, "state after steps")

    starts = np.arange(TIME - PIECE + 1)
    rows = starts[:, None] + np.arange(PIECE)
    states = jax.tree.map(lambda x: x[starts, 0], before)
    pieces = jax.tree.map(lambda x: x[0][rows], tuple(arrays))
    y, after = jax.jit(lambda pieces: memory.scan(rule, params, states, *pieces))(pieces)
    assert_close(y, expected[0][rows], EXACT, "piece")
    ends = jax.tree.map(lambda x: x[starts[:-1] + PIECE, 0], before)
    assert_close(jax.tree.map(lambda x: x[:-1], after), ends, EXACT, "state after piece")


@pytest.mark.parametrize(
    "name", some_slow(["grm", "soup", "ssc", "ssc_one", "ssc_atlas"], ["grm", "soup", "ssc", "ssc_atlas"])
)
def test_bfloat16(name):
    rule = CASES[name]
    args = make_inputs(rule, dtype=jnp.bfloat16)
    y = jax.jit(lambda *args: outputs(memory.scan, rule, *args))(*args)
    assert y.dtype == jnp.bfloat16
    # The same rounded inputs, computed in float32; the top memories are those of the same float32 scores.
    want = jax.jit(lambda *args: outputs(memory.reference, rule, *args))(*args)
    assert_close(y.astype(jnp.float32), want.astype(jnp.float32), 2e-2)


@pytest.mark.parametrize(
    "name",
    some_slow(
        ["residual", "grm_sigmoid_sum", "grm_carry_capacity", "soup_small", "soup_carry", "ssc", "ssc_one", "ssc_dot"],
        slow=["residual", "soup_carry", "soup_small", "ssc", "ssc_dot", "grm_carry_capacity"],
    ),
)
def test_the_future_never_changes_the_past(name, x64):
    """Nothing of the tokens from t on, not even how many there are, changes what the tokens before t read."""
    rule = CASES[name]
    args = make_inputs(rule)
    other = make_inputs(rule, seed=5)
    run = jax.jit(lambda *args: outputs(memory.scan, rule, *args))
    y = run(*args)
    for t in (1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, TIME - 1):
        spliced = jax.tree.map(lambda a, b, t=t: jnp.concatenate([a[:, :t], b[:, t:]], 1), args[1:], other[1:])
        assert_close(run(args[0], *spliced)[:, :t], y[:, :t], 1e-12)
    short = jax.tree.map(lambda x: x[:, :9], args[1:])
    assert_close(run(args[0], *short), y[:, :9], 1e-12)


@pytest.mark.parametrize("aggregation", some_slow(["residual", "grm", "soup", "ssc"], ["residual", "grm"]))
def test_one_segment_is_the_base_rule(aggregation, x64):
    rule = CachedRule(TITANS, aggregation, 16)
    args = make_inputs(rule)
    plain = args[4]._replace(connector=None)
    want = memory.scan(TITANS, args[0], None, *args[1:4], plain)[0]
    assert_close(run(memory.scan, rule, *args), want, EXACT)


def test_a_blend_of_zero_is_the_base_rule(x64):
    """Whatever the aggregation, λ = 0 with memories that carry over is the memory alone, and λ gets a gradient there."""
    one = rules.gated_delta_rule()
    cached = [CachedRule(one, name, SIZE, start="carry", blended=True) for name in ("residual", "grm", "soup", "ssc")]
    all_args = [make_inputs(rule) for rule in cached]

    @jax.jit
    def run_all(args):
        want = memory.scan(one, args[0][0], None, *args[0][1:4], args[0][4]._replace(connector=None, blend=None))[0]
        weights = jnp.cos(jnp.arange(want.size)).reshape(want.shape)

        def read(blend, rule, args):
            y = outputs(memory.scan, rule, *args[:4], args[4]._replace(blend=blend))
            return jnp.sum(weights * y), y

        zero = jnp.zeros((2, TIME, 2))
        return want, [jax.grad(read, has_aux=True)(zero, *each) for each in zip(cached, args)]

    want, found = run_all(all_args)
    for slope, y in found:
        assert_close(y, want, EXACT)
        later = np.abs(slope[:, SIZE:])
        assert later.min() > 0


def test_residual_of_linear_attention_is_linear_attention(x64):
    rule = CachedRule(rules.linear_attention(), "residual", SIZE)
    args = make_inputs(rule)
    params = jax.tree.map(jnp.zeros_like, args[0])  # a matrix memory starts at zero
    want = memory.scan(rule.rule, params, None, *args[1:])[0]
    assert_close(run(memory.scan, rule, params, *args[1:]), want, EXACT)


def test_residual_of_kernel_attention_is_attention_over_each_segment(x64):
    """Softmax attention over each segment by itself, summed: one softmax for each, not one over all."""
    rule = CachedRule(ATTENTION, "residual", SIZE)
    params, q, k, v, gates = make_inputs(rule)
    ones = jax.tree.map(jnp.ones_like, gates)
    scores = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k) / 2)  # √4
    scores = jnp.tril(scores)
    t = np.arange(TIME)
    segments = [jnp.where(t // SIZE == i, scores, 0.0) for i in range(4)]
    shares = sum(x / jnp.maximum(x.sum(-1, keepdims=True), 1e-300) for x in segments)
    want = jnp.einsum("bhts,bshv->bthv", shares, v)
    assert_close(run(memory.scan, rule, params, q, k, v, ones), want, EXACT)


def test_one_segment_is_the_softmax_rule(x64):
    one = CASES["grm_delta_kernel"].rule
    args = make_inputs(CachedRule(one, "ssc", 16))
    want = memory.scan(one, args[0], None, *args[1:4], args[4]._replace(connector=None))[0]
    assert_close(run(memory.scan, CachedRule(one, "ssc", 16), *args), want, EXACT)


def test_a_soup_of_matrices_is_gated_residual_memory(x64):
    soup = CachedRule(rules.delta_rule(), "soup", SIZE)
    args = make_inputs(soup)
    grm = dataclasses.replace(soup, aggregation="grm")
    assert_close(run(memory.reference, soup, *args), run(memory.reference, grm, *args), EXACT)
    assert_close(run(memory.scan, soup, *args), run(memory.reference, grm, *args), EXACT)


def test_selecting_all_memories_is_gated_residual_memory(x64):
    ssc = CachedRule(TITANS, "ssc", SIZE, top_k=3)
    args = make_inputs(ssc)
    grm = dataclasses.replace(ssc, aggregation="grm")
    assert_close(run(memory.scan, ssc, *args), run(memory.reference, grm, *args), EXACT)


def test_memories_are_selected_for_one_segment_at_a_time():
    """The scores of all tokens with all memories would be more than all else, forward and backward."""
    rule, segments = CachedRule(rules.linear_attention(), "ssc", SIZE, top_k=2), 64
    params, *arrays = make_inputs(rule, dtype=jnp.float32, batch=1, heads=1, time=segments * SIZE)
    loss = lambda params, *x: jnp.sum(memory.scan(rule, params, None, *x)[0] ** 2)
    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(params, *arrays))
    shapes = [[int(x) for x in shape.split(",")] for shape in re.findall(r"\w\[([\d,]+)\]", program)]
    over_memories = [np.prod(shape) for shape in shapes if shape[-1] == segments]
    assert segments * SIZE in over_memories
    assert max(over_memories) < segments * segments * SIZE


def test_only_selected_memories_have_gradients(x64):
    """No gradient reaches the keys of a segment that nobody selects: its pooled key and its memory are not read."""
    rule = CachedRule(rules.linear_attention(), "ssc", SIZE, top_k=1, connector="query")
    params, q, k, v, gates = make_inputs(rule, batch=1, heads=1)
    far = jnp.asarray([1.0, 0.0, 0.0, 0.0])
    q = jnp.broadcast_to(far, q.shape)
    k = k.at[:, :SIZE].set(-far).at[:, SIZE : 2 * SIZE].set(far)  # every later token selects the second segment
    late = lambda k: jnp.sum(jnp.square(memory.scan(rule, params, None, q, k, v, gates)[0][:, 2 * SIZE :]))
    gradient = jax.jit(jax.grad(late))(k)
    assert float(jnp.abs(gradient[:, :SIZE]).max()) == 0.0
    assert float(jnp.abs(gradient[:, SIZE : 2 * SIZE]).max()) > 0.0


def test_stop_gradient(x64):
    """Through a cached memory nothing flows, through the online one it does; values stay the same."""
    rule = CachedRule(rules.delta_rule(), "residual", SIZE)
    params, q, k, v, gates = make_inputs(rule)
    stopped = dataclasses.replace(rule, stop_gradient=True)
    late = lambda rule, v: jnp.sum(jnp.square(memory.scan(rule, params, None, q, k, v, gates)[0][:, 2 * SIZE :]))
    run = jax.jit(jax.value_and_grad(late, argnums=1), static_argnums=0)
    (value, free), (same, cut) = run(rule, v), run(stopped, v)
    assert_close(same, value, 1e-12)
    assert float(jnp.abs(cut[:, : 2 * SIZE]).max()) == 0.0
    assert float(jnp.abs(free[:, : 2 * SIZE]).max()) > 0.0
    assert float(jnp.abs(cut[:, 2 * SIZE :]).max()) > 0.0


def test_more_memories_than_places_is_nan_not_a_wrong_number():
    rule = CachedRule(rules.linear_attention(), "grm", SIZE)
    params, *arrays = make_inputs(rule, dtype=jnp.float32, batch=1, time=4 * SIZE)
    state = memory.init_state(rule, params, batch_size=1, max_length=3 * SIZE)
    with pytest.raises(ValueError, match=rf"state has room for {3 * SIZE} more tokens, got {4 * SIZE}"):
        memory.scan(rule, params, state, *arrays)
    y, _ = jax.jit(functools.partial(memory.scan, rule))(params, state, *arrays)
    assert np.isfinite(y[:, : 3 * SIZE]).all()
    assert np.isnan(y[:, 3 * SIZE :]).all()
    short = jax.tree.map(lambda x: x[:, : 2 * SIZE], tuple(arrays))
    ids = jnp.zeros((1, 2 * SIZE), jnp.int32).at[:, 1::2].set(1)
    run = jax.jit(lambda ids, *a: memory.scan(rule, params, None, *a, segment_ids=ids, max_segments=2)[0])
    assert np.isnan(run(ids, *short)).any()


@pytest.mark.parametrize("name", ["grm_sigmoid_sum", "ssc_one"])
def test_a_read_of_no_queries(name):
    rule = CASES[name]
    params, q, _, _, gates = make_inputs(rule, dtype=jnp.float32)
    state = memory.init_state(rule, params, batch_size=2, max_length=20)
    connector = None if gates.connector is None else gates.connector[:, :0]
    assert memory.read(rule, params, state, q[:, :0], connector).shape == (2, 0, 2, 4)


def test_bounded_by_a_capacity():
    """An endless stream: the state keeps its size, and outputs depend on the last memories only."""
    rule = CachedRule(rules.linear_attention(), "grm", SIZE, capacity=2)
    params, *arrays = make_inputs(rule, dtype=jnp.float32, batch=1, time=40)
    state = memory.init_state(rule, params, batch_size=1)
    sizes = jax.tree.map(jnp.shape, state)
    run = jax.jit(lambda state, *a: memory.scan(rule, params, state, *a))
    for t in range(0, 40, 10):
        y, state = run(state, *slice_time(tuple(arrays), t, t + 10))
        assert jax.tree.map(jnp.shape, state) == sizes
    late = slice_time(tuple(arrays), 28, 40)  # the segment of the last four tokens, and the two before it
    assert_close(y[:, -4:], memory.scan(rule, params, None, *late)[0][:, -4:], 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_size": 5}, "segment_size=5 must be a multiple of the rule's chunk_size=2"),
        ({"segment_size": 0}, "segment_size must be an integer ≥ 1, got 0"),
        ({"aggregation": "supe"}, "soup"),
        ({"gate": "softmx"}, "softmax"),
        ({"start": "new"}, "start"),
        ({"top_k": 0}, "top_k must be an integer ≥ 1, got 0"),
        ({"aggregation": "ssc", "top_k": 3, "capacity": 2}, "top_k=3 must be at most capacity=2"),
        ({"connector": "age"}, 'connector="age" .* capacity is None and must be a number'),
        ({"capacity": -1}, "capacity must be an integer ≥ 1, got -1"),
        ({"rule": "swdt"}, "rule must be a MemoryRule or a SoftmaxRule, got str"),
        ({"rule": ATTENTION, "aggregation": "soup"}, "soup.* is not supported for a softmax memory"),
        ({"rule": ATTENTION, "start": "carry"}, "carry.* is not supported for a softmax memory"),
    ],
)
def test_refused_rules(change, message):
    with pytest.raises(ValueError, match=message):
        CachedRule(**{"rule": TITANS, "segment_size": SIZE, **change})


def test_refused_calls():
    rule = CachedRule(TITANS, "grm", SIZE)
    params, q, k, v, gates = make_inputs(rule, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"gates.connector is missing.*\[2, 15, 2, 4\]"):
        memory.scan(rule, params, None, q, k, v, gates._replace(connector=None))
    with pytest.raises(ValueError, match=r"gates.connector has shape \(2, 15, 2, 3\)"):
        memory.scan(rule, params, None, q, k, v, gates._replace(connector=gates.connector[..., :3]))
    residual = CachedRule(TITANS, "residual", SIZE)
    with pytest.raises(ValueError, match="does not use it"):
        memory.scan(residual, params, None, q, k, v, gates)
    with pytest.raises(ValueError, match="max_length is None"):
        memory.init_state(rule, params, batch_size=2)
    state = memory.init_state(rule, params, batch_size=2, max_length=20)
    with pytest.raises(TypeError, match="state must be a CachedState, got MemoryState"):
        memory.scan(rule, params, state.online, q, k, v, gates)
    with pytest.raises(ValueError, match="state=None"):
        memory.scan(rule, params, state, q, k, v, gates, segment_ids=jnp.zeros((2, TIME), jnp.int32))
    with pytest.raises(ValueError, match="capacity=7"):
        memory.scan(dataclasses.replace(rule, capacity=7), params, state, q, k, v, gates)
    with pytest.raises(ValueError, match="does not use it"):
        memory.read(TITANS, params, state.online, q, q)
    with pytest.raises(ValueError, match=r"gates\.blend is given, but only a CachedRule with blended=True uses it"):
        memory.scan(rule, params, None, q, k, v, gates._replace(blend=gates.retention))
    with pytest.raises(ValueError, match="blend is given, but only a CachedRule with blended=True uses it"):
        memory.read(rule, params, state, q, blend=gates.retention)
    aged = dataclasses.replace(rule, connector="age", capacity=7)
    with pytest.raises(ValueError, match=r"gates.connector has shape \(2, 15, 2, 4\), must be \[2, 15, 2, 8\]"):
        memory.scan(aged, params, None, q, k, v, gates)
    with pytest.raises(ValueError, match=r'connector is missing; this rule has connector="age"'):
        memory.read(aged, params, memory.init_state(aged, params, batch_size=2), q)
    blended = dataclasses.replace(rule, blended=True)
    with pytest.raises(ValueError, match=r"gates.blend is missing; .* shape \[2, 15, 2\]"):
        memory.scan(blended, params, None, q, k, v, gates)
    with pytest.raises(ValueError, match=r"gates.blend has shape \(2, 15, 3\)"):
        memory.scan(blended, params, None, q, k, v, gates._replace(blend=jnp.zeros((2, 15, 3))))
