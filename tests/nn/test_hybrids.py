"""MAC, MAG, MAL and the attention mixers: their definitions, streamed = parallel, causal, segments, gradients, dtypes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import memory, rules
from atlasjax.generate import SamplingConfig, generate
from atlasjax.memory.fast_weights import kernels
from atlasjax.mixers.rotary import rotate
from atlasjax.nn import (
    AttentionConfig,
    CachingConfig,
    LanguageModel,
    MemoryConfig,
    ModelConfig,
    logical_axes,
    state_bytes,
)
from atlasjax.nn.mixers import MIXERS
from atlasjax.nn.parameters import values
from tests import comparisons
from tests.marks import some_slow
from tests.nn.cases import HYBRIDS
from tests.streams import streamed

DIM, HEADS, HEAD, BATCH, TIME, SEGMENT, WINDOW = 12, 2, 4, 2, 22, 4, 5
MEMORIES = {
    "titans": MemoryConfig("titans", chunk_size=2, expansion=1, max_step=0.1),
    "deep_transformer": MemoryConfig("deep_transformer", chunk_size=2, structure="matrix"),
    **{
        name: MemoryConfig("titans", chunk_size=2, structure="matrix", max_step=0.1, caching=caching)
        for name, caching in {
            "grm": CachingConfig("grm", segment_size=6),
            "age": CachingConfig("ssc", segment_size=4, connector="age", capacity=4),
            "log_linear": CachingConfig("log_linear", segment_size=4),
        }.items()
    },
}
MATRIX = MemoryConfig("delta_rule", chunk_size=2)
# A deep memory with momentum in all; and in MAC, which keeps what retrieval reads, a softmax memory, whose state is another.
CASES = [*((name, "titans") for name in HYBRIDS), ("mac", "deep_transformer")]


def each_case(*cases, slow=()):
    """By default a softmax memory is packed; what it computes is in tests/memory/softmax."""
    marks = lambda case: [pytest.mark.slow] if case in slow else []
    return pytest.mark.parametrize(("name", "rule"), [pytest.param(*case, marks=marks(case)) for case in cases])


pytestmark = pytest.mark.usefixtures("compile_fast")


def make_config(rule, **changes):
    attention = AttentionConfig(window=WINDOW, rope_theta=30.0, persistent_tokens=2, segment_size=SEGMENT)
    options = dict(dim=DIM, num_layers=2, num_heads=HEADS, head_dim=HEAD, dtype="float32", conv_width=3)
    return ModelConfig(**{**options, "attention": attention, "memory": MEMORIES[rule], **changes})


def abstract(name, config):
    return nnx.eval_shape(lambda: MIXERS[name](config, rngs=nnx.Rngs(0)))


@functools.cache
def make(name, rule):
    """(graphdef, params, jitted parallel pass), every parameter moved off its initial value: ones and zeros hide mistakes."""
    config = make_config(rule)
    graphdef = nnx.split(abstract(name, config), nnx.Param)[0]
    initial = jax.jit(lambda: nnx.split(MIXERS[name](config, rngs=nnx.Rngs(0)), nnx.Param)[1])()
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), initial)
    return graphdef, params, jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))


def inputs(seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, TIME, DIM))


close = functools.partial(comparisons.close, tolerance=3e-5)


# ---- definitions of one row, token by token ----


def attend(q, keys, seen_values, persistent, at):
    """One token's softmax over a list of (position, key, value), and the persistent tokens; [heads, value_dim]."""
    turn = lambda x, position: rotate(x[None, None], jnp.array([[position]]), 30.0)[0, 0]
    logits = [jnp.sum(turn(q, at) * turn(k, s), axis=-1) for s, k in keys]
    logits += [jnp.sum(q * k, axis=-1) for k in persistent.keys]
    weights = jax.nn.softmax(jnp.stack(logits) / HEAD**0.5, axis=0)
    return jnp.einsum("nh,nhv->hv", weights, jnp.stack([*seen_values, *persistent.values]))


def window_attention(heads, x):
    q, k, v = (z[0] for z in heads.project(x[None]))
    seen = lambda t: range(max(0, t - WINDOW + 1), t + 1)
    y = [
        attend(q[t], [(s, k[s]) for s in seen(t)], [v[s] for s in seen(t)], heads.persistent(), t)
        for t in range(len(x))
    ]
    return jnp.stack(y)


class MemoryByToken:
    """A memory that reads x token by token: its convolution, projections and gates as they are written down."""

    def __init__(self, heads):
        self.heads, self.params, self.past = heads, values(heads.memory), [jnp.zeros((3, HEADS * HEAD))] * 2
        self.state = memory.init_state(heads.rule, self.params, batch_size=1, max_length=TIME)

    def __call__(self, x):
        self.past.append(jnp.einsum("e,enc->nc", x, self.heads.inputs.kernel[:, :3]))
        mixed = sum(tap * z for tap, z in zip(self.heads.conv.kernel[...], self.past[-3:], strict=True))
        q, k, v = jax.nn.silu(mixed).reshape(3, HEADS, HEAD)
        q, k = (z / jnp.sqrt(jnp.sum(z * z, axis=-1, keepdims=True) + 1e-6) for z in (q, k))
        gates = self.heads.gates(x[None])
        return self.step(q, k, v, gates)

    def step(self, q, k, v, gates):
        y, self.state = memory.step(self.heads.rule, self.params, self.state, q[None], k[None], v[None], gates)
        return y[0]

    def read(self, state, q, u):
        return memory.read(self.heads.rule, self.params, state, q[None, None], u)[0, 0]


def rms(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def join(parts, a, m):
    y = rms(a, parts.attention_norm.scale[...]) * jax.nn.sigmoid(rms(m, parts.memory_norm.scale[...]))
    return y.reshape(len(y), -1) @ parts.out.kernel[...]


def swa(mixer, x):
    return window_attention(mixer.attention, x).reshape(len(x), -1) @ mixer.out.kernel[...]


def mag(mixer, x):
    m = MemoryByToken(mixer.memory)
    return join(mixer.join, window_attention(mixer.attention, x), jnp.stack([m(token) for token in x]))


def mal(mixer, x):
    m, parts = MemoryByToken(mixer.memory), mixer.memory
    y = rms(jnp.stack([m(token) for token in x]), parts.norm.scale[...]).reshape(len(x), -1)
    y = (y * jax.nn.silu(x @ parts.inputs.kernel[:, 3])) @ parts.out.kernel[...]
    return window_attention(mixer.attention, rms(y, mixer.norm.scale[...])).reshape(len(x), -1) @ mixer.out.kernel[...]


def mac(mixer, x):
    m, a, y, past = MemoryByToken(mixer.memory), [], [], [jnp.zeros(HEADS * HEAD)] * 2
    for t, token in enumerate(x):
        if t % SEGMENT == 0:
            start, keys, seen = m.state, [], []
        past.append(token @ mixer.queries.kernel[...])
        q = jax.nn.silu(sum(c * z for c, z in zip(mixer.conv.kernel[...], past[-3:], strict=True))).reshape(HEADS, HEAD)
        q = q / jnp.sqrt(jnp.sum(q * q, axis=-1, keepdims=True) + 1e-6)
        u = None if mixer.connector is None else jnp.einsum("e,ehc->hc", token, mixer.connector.kernel[...])[None, None]
        h = m.read(start, q, u)
        retrieved = rms(h, mixer.retrieved_norm.scale[...]).reshape(-1) @ mixer.retrieved.kernel[...]
        for z in (token, retrieved):
            _, k, v = (z[0, 0] for z in mixer.attention.project(z[None, None]))
            keys.append((t % SEGMENT, k))
            seen.append(v)
        q = mixer.attention.project(token[None, None])[0][0, 0]
        a.append(attend(q, keys, seen, mixer.attention.persistent(), t % SEGMENT))
        y.append(m(rms(a[-1].reshape(-1) @ mixer.written.kernel[...], mixer.written_norm.scale[...])))
    return join(mixer.join, jnp.stack(a), jnp.stack(y))


@each_case(*CASES[1:], slow=CASES[-1:])
def test_layer_is_its_definition(name, rule):
    graphdef, params, parallel = make(name, rule)
    definition = {"swa": swa, "mag": mag, "mal": mal, "mac": mac}[name]
    got = parallel(params, inputs())
    assert got.shape == (BATCH, TIME, DIM)
    close(got[1, :14], definition(nnx.merge(graphdef, params), inputs()[1, :14]))


@pytest.mark.parametrize("rule", some_slow(["grm", "age", "log_linear"], ["age", "log_linear"]))
def test_mac_of_cached_memories_is_its_definition_and_streams(rule):
    graphdef, params, parallel = make("mac", rule)
    got = parallel(params, inputs())
    close(got[1, :14], mac(nnx.merge(graphdef, params), inputs()[1, :14]))
    empty = nnx.merge(graphdef, params).init_state(BATCH, TIME)
    close(stream("mac", rule, inputs(), empty, [0, 1, 11, 12, TIME])[0], got)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(inputs()) ** 2)))(params)
    assert np.abs(gradient["connector"]["kernel"][...]).max() > 1e-6


# ---- what holds for every mixer ----


@functools.cache
def jitted_extend(name, rule):
    graphdef = make(name, rule)[0]
    return jax.jit(lambda p, x, state: nnx.merge(graphdef, p).extend(x, state))


def stream(name, rule, x, state, cuts):
    return streamed(functools.partial(jitted_extend(name, rule), make(name, rule)[1]), x, state, cuts)


@each_case(*CASES, slow=CASES[-1:])
def test_streamed_is_parallel(name, rule):
    graphdef, params, parallel = make(name, rule)
    expected = parallel(params, inputs())
    empty = nnx.merge(graphdef, params).init_state(BATCH, TIME)
    assert all(leaf.shape[0] == BATCH for leaf in jax.tree.leaves(empty))
    states = []
    # For MAC with segments of 4: one by one; from inside a segment over whole ones into another; pieces within two segments.
    within = [[0, 3, 6, 9, 10, 13, 16, 19, 22]] if (name, rule) == ("mac", "titans") else []
    for cuts in (range(TIME + 1), [0, 1, 22], *within):
        y, state = stream(name, rule, inputs(), empty, cuts)
        close(y, expected)
        states.append(state)
    for state in states[1:]:
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(states[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=3e-5)


@pytest.mark.parametrize("cuts", [[0, 1, 5], [0, 21]])
def test_rows_of_a_stream_may_stand_anywhere_in_their_segments(cuts):
    graphdef, params, parallel = make("mac", "titans")
    x, empty = inputs(), nnx.merge(graphdef, params).init_state(BATCH, TIME)
    _, early = stream("mac", "titans", x, empty, range(2))
    _, late = stream("mac", "titans", x[:, :4], empty, range(4))
    mixed = jax.tree.map(lambda a, b: jnp.stack([a[0], b[1]]), early, late)
    longer = jnp.concatenate([x, x], axis=1)
    pieces = jnp.stack([longer[0, 1:22], longer[1, 3:24]])
    y, _ = stream("mac", "titans", pieces, mixed, cuts)
    whole = parallel(params, longer)
    close(y, jnp.stack([whole[0, 1 : 1 + cuts[-1]], whole[1, 3 : 3 + cuts[-1]]]))


@each_case(*CASES, slow=[("mal", "titans"), ("mag", "titans"), *CASES[-1:]])
def test_causal_and_rows_independent(name, rule):
    _, params, parallel = make(name, rule)
    before = np.asarray(parallel(params, inputs()))
    for t in (0, 5, 6, 7, TIME - 1):
        after = np.asarray(parallel(params, inputs().at[1, t].add(1.0)))
        assert np.array_equal(after[0], before[0])
        assert np.array_equal(after[1, :t], before[1, :t])
        reach = WINDOW if name == "swa" else TIME
        moved = np.abs(after[1] - before[1]).max(axis=1)
        assert moved[t : t + reach].min() > 1e-7  # seen by all later tokens, or by those of the window
        assert np.all(moved[t + reach :] == 0)


@each_case(*CASES)
def test_packed_row_is_its_segments(name, rule):
    graphdef, params, parallel = make(name, rule)
    ids = np.repeat([[0, 1, 0, 2], [3, 4, 5, 6]], [5, 4, 1, 12], axis=1)  # an id may return: still another segment
    packed = jax.jit(lambda p, x, ids: nnx.merge(graphdef, p)(x, ids, 4))(params, inputs(), jnp.asarray(ids))
    for start, stop in itertools.pairwise([0, 5, 9, 10, 22]):
        alone = parallel(params, jnp.roll(inputs(), -start, axis=1))[:, : stop - start]
        close(packed[:, start:stop], alone)


def test_tokens_of_too_many_documents_are_nan():
    graphdef, params, parallel = make("mac", "titans")
    ids = jnp.broadcast_to(
        jnp.maximum(jnp.arange(TIME) - 9, 0), (BATCH, TIME)
    )  # ten tokens, then twelve of one token each
    packed = np.asarray(jax.jit(lambda p, x, ids: nnx.merge(graphdef, p)(x, ids, 4))(params, inputs(), ids))
    close(packed[:, :10], parallel(params, inputs())[:, :10])
    wrong = np.isnan(packed).all(axis=(0, 2))
    assert wrong[-1]
    single = parallel(params, jnp.roll(inputs(), -10, axis=1))[:, :1]
    close(packed[:, 10:11], single)
    assert np.array_equal(wrong, np.isnan(packed).any(axis=(0, 2)))
    with pytest.raises(ValueError, match="max_segments"):
        jax.jit(lambda p, x, ids: nnx.merge(graphdef, p)(x, ids))(params, inputs(), ids)


@each_case(*CASES, slow=CASES[-1:])
def test_every_parameter_learns_and_names_its_axes(name, rule):
    graphdef, params, _ = make(name, rule)
    weights = jax.random.normal(jax.random.key(3), (BATCH, TIME, DIM))
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(weights * nnx.merge(graphdef, p)(inputs()))))(params)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient)), path
        assert np.abs(gradient).max() > 1e-6, path
    axes = logical_axes(abstract(name, make_config(rule)))
    for names, value in zip(jax.tree.leaves(axes), jax.tree.leaves(params), strict=True):
        assert len(names) == value.ndim


@each_case(*CASES[:-1], slow=[("mag", "titans"), ("mal", "titans"), ("swa", "titans")])
def test_bfloat16_is_close_to_float32(name, rule):
    half = nnx.split(abstract(name, make_config(rule, dtype="bfloat16")), nnx.Param)[0]
    _, params, parallel = make(name, rule)
    expected = np.asarray(parallel(params, inputs()))
    y = jax.jit(lambda p, x: nnx.merge(half, p)(x.astype(jnp.bfloat16)))(params, inputs())
    assert y.dtype == jnp.bfloat16
    assert np.sqrt(np.mean((np.asarray(y, np.float32) - expected) ** 2)) < 0.03 * expected.std()


@pytest.mark.parametrize("name", some_slow(["mac", "mag", "mal"], ["mac"]))
def test_every_rule_fits(name):
    """Shapes of a step, and in MAC of the parallel pass over packed documents; wide values where there is no residual."""
    for rule in rules.REGISTRY:
        wide = 1 if MemoryConfig(rule).build().structure.residual else 2
        attention = AttentionConfig(8, persistent_tokens=1, segment_size=64)
        config = make_config("titans", memory=MemoryConfig(rule), value_expansion=wide, attention=attention)
        graphdef, params = nnx.split(abstract(name, config), nnx.Param)
        if name == "mac":
            x, ids = jax.ShapeDtypeStruct((BATCH, 70, DIM), jnp.float32), jnp.zeros((BATCH, 70), jnp.int32)
            y = jax.eval_shape(lambda p, x, g=graphdef, ids=ids: nnx.merge(g, p)(x, ids, 2), params, x)
            assert y.shape == x.shape
        x = jax.ShapeDtypeStruct((BATCH, 1, DIM), jnp.float32)
        state = jax.eval_shape(lambda p, g=graphdef: nnx.merge(g, p).init_state(BATCH, 9), params)
        y, after = jax.eval_shape(lambda p, x, s, g=graphdef: nnx.merge(g, p).extend(x, s), params, x, state)
        assert y.shape == x.shape
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_a_model_of_bounded_and_unbounded_states():
    config = make_config("titans", vocab_size=17, mlp_dim=16, mixer=("memory", "attention"), memory=MATRIX)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, 11), 0, 17)
    parallel = jax.jit(lambda x: model(x))
    expected = parallel(tokens)
    extend = jax.jit(model.extend)
    first, cache = extend(tokens[:, :9], model.init_cache(BATCH, 10))
    second, cache = extend(tokens[:, 9:10], cache)
    close(jnp.concatenate([first, second], axis=1), expected[:, :10])
    beyond, _ = extend(tokens[:, 10:], cache)
    assert np.all(np.isnan(beyond))  # never a silently wrong number
    with pytest.raises(ValueError, match="max_length is None"):
        model.init_cache(BATCH)
    # Keys and values in float32, of HEADS · HEAD numbers each.
    assert state_bytes(config, length=30) - state_bytes(config, length=20) == 10 * 2 * HEADS * HEAD * 4
    drawn = generate(model, np.asarray(tokens[:, :9]), 2, config=SamplingConfig(temperature=0))
    logits = parallel(jnp.concatenate([tokens[:, :9], drawn], axis=1))
    np.testing.assert_array_equal(drawn, logits[:, 8:-1].argmax(-1))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("swa", {"attention": AttentionConfig()}, "mixer 'swa' needs a window: attention.window is None"),
        ("mag", {"attention": AttentionConfig()}, "mixer 'mag' needs a window"),
        ("mal", {"attention": AttentionConfig()}, "mixer 'mal' needs a window"),
        ("mac", {"attention": AttentionConfig(segment_size=5)}, "segment_size=5 must be a multiple of .*chunk_size=2"),
        ("attention", {"head_dim": 3}, "head_dim=3 must be even"),
        (
            "mag",
            {"value_expansion": 2},
            "value_expansion=2 needs a memory without a residual",
        ),
        ("mac", {"attention": AttentionConfig(gate=True)}, "mixer 'mac': attention.gate is True; it must be False"),
        ("mag", {"attention": AttentionConfig(window=5, kv_heads=1)}, "attention.kv_heads is 1; it must be None"),
        ("mal", {"attention": AttentionConfig(window=5, head_dim=2)}, "attention.head_dim is 2; it must be None"),
        ("swa", {"attention": AttentionConfig(window=5, kv_heads=4)}, "kv_heads=4 must divide the 2 heads of queries"),
        ("attention", {"attention": AttentionConfig(rope_dim=6)}, "rope_dim=6 must be even and at most head_dim=4"),
    ],
)
def test_bad_configs_are_named(name, changes, words):
    with pytest.raises(ValueError, match=words):
        abstract(name, make_config("titans", **changes))


def test_a_state_of_all_tokens_needs_a_length():
    graphdef, params, _ = make("attention", "titans")
    with pytest.raises(ValueError, match="'attention' keeps the keys and values of every token: max_length is None"):
        nnx.merge(graphdef, params).init_state(BATCH)
    graphdef, params, _ = make("mac", "deep_transformer")
    with pytest.raises(ValueError, match="max_length is None"):
        nnx.merge(graphdef, params).init_state(BATCH)


def windowed():
    return memory.MemoryRule(memory.structures.Matrix(), window=3, chunk_size=8)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_inside_mac(packed, monkeypatch):
    """Each segment of two chunks is written by a kernel, from the memory, momentum and window after the segment before."""
    monkeypatch.setattr(kernels, "chunk_memory", functools.partial(kernels.chunk_memory, interpret=True))
    attention = AttentionConfig(persistent_tokens=2, segment_size=16)
    memories = MemoryConfig(windowed, max_step=0.1)
    config = make_config("titans", attention=attention, memory=memories)
    x = jax.random.normal(jax.random.key(3), (1, 40, DIM))
    ids = {"segment_ids": jnp.repeat(jnp.arange(2), 20)[None], "max_segments": 2} if packed else {}
    graphdef, params = nnx.split(MIXERS["mac"](config, rngs=nnx.Rngs(0)), nnx.Param)
    results = []
    for implementation in ("xla", "pallas_tpu"):
        changed = dataclasses.replace(memories, implementation=implementation)
        mixer = MIXERS["mac"](dataclasses.replace(config, memory=changed), rngs=nnx.Rngs(0))
        graphdef = nnx.split(mixer, nnx.Param)[0]

        def loss(p, x, graphdef=graphdef):
            y = nnx.merge(graphdef, p)(x, **ids)
            return jnp.sum(jnp.sin(y)), y

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        assert ("pallas_call" in str(run.trace(params, x).jaxpr)) == (implementation == "pallas_tpu")
        (_, y), slopes = run(params, x)
        results.append((y, slopes))  # not the sum, whose terms may cancel
    jax.tree.map(close, results[1], results[0])
