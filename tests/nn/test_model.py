"""The language model: streamed = parallel, causal, independent rows and segments, gradients, dtypes, logical axes."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import (
    AXES,
    AttentionConfig,
    LanguageModel,
    MemoryConfig,
    ModelConfig,
    SSMConfig,
    abstract_model,
    logical_axes,
)
from atlasjax.nn.attention import AttentionMixer
from tests.marks import if_slow, some_slow
from tests.streams import streamed

# One rule for each way through the engines: matrix, LayerNorm inside, momentum, window with features, Muon.
MEMORIES = {
    "delta_rule": MemoryConfig("delta_rule", chunk_size=4, max_step=1.0),
    "ttt_mlp": MemoryConfig("ttt_mlp", chunk_size=4, expansion=2, max_step=0.1),
    "titans": MemoryConfig("titans", chunk_size=4, expansion=2, max_step=0.1),
    "omeganet": MemoryConfig("omeganet", chunk_size=4, window=3, degree=2, expansion=2, max_step=0.1),
    "atlas": MemoryConfig(
        "atlas", chunk_size=4, window=3, features="elementwise", expansion=2, newton_schulz_every=2, max_step=0.2
    ),
    "of another kind": MemoryConfig("tests.memory.own_family:MovingSum"),
}
VOCAB, BATCH, TIME = 17, 2, 14


pytestmark = pytest.mark.usefixtures("compile_fast")


def make_config(rule, **changes):
    config = ModelConfig(
        vocab_size=VOCAB, dim=16, num_layers=2, num_heads=2, mlp_dim=24, memory=MEMORIES[rule], dtype="float32"
    )
    return dataclasses.replace(config, **changes)


@functools.cache
def make(config):
    """(graphdef, params, jitted parallel pass) with gates at which the memory writes a lot and forgets slowly."""
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    gates = model.layers.mixer.gates
    logits = [3.0 if name == "retention" else 0.3 for name, channels in gates.channels for _ in range(channels or 1)]
    gates.bias[...] = jnp.broadcast_to(jnp.array(logits), gates.bias[...].shape)
    graphdef, params = nnx.split(model, nnx.Param)
    return graphdef, params, jax.jit(lambda p, tokens: nnx.merge(graphdef, p)(tokens))


def tokens(seed=0, batch=BATCH, time=TIME):
    return jax.random.randint(jax.random.key(seed), (batch, time), 0, VOCAB)


# tests/test_models.py streams and trains the others.
@pytest.mark.parametrize("rule", some_slow(MEMORIES, set(MEMORIES) - {"delta_rule", "of another kind"}))
def test_streamed_is_parallel(rule):
    graphdef, params, parallel = make(make_config(rule))
    expected = parallel(params, tokens())
    assert expected.shape == (BATCH, TIME, VOCAB)
    assert expected.dtype == jnp.float32

    extend = jax.jit(lambda p, tokens, cache: nnx.merge(graphdef, p).extend(tokens, cache))

    def stream(cuts):
        empty = nnx.merge(graphdef, params).init_cache(BATCH)
        logits, cache = streamed(functools.partial(extend, params), tokens(), empty, cuts)
        np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=1e-4)
        return cache

    by_token, by_piece = stream(range(TIME + 1)), stream([0, 6, 7, 13, 14])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-3), by_piece, by_token)


@pytest.mark.parametrize("rule", some_slow(MEMORIES, ["ttt_mlp", "omeganet", "titans"]))
def test_causal_and_rows_independent(rule):
    _, params, parallel = make(make_config(rule))
    before = np.asarray(parallel(params, tokens()))
    for t in (0, 3, 4, 9, TIME - 1):
        changed = tokens().at[1, t].add(1) % VOCAB
        after = np.asarray(parallel(params, changed))
        assert np.array_equal(after[0], before[0])
        assert np.array_equal(after[1, :t], before[1, :t])
        assert not np.array_equal(after[1, t], before[1, t])
    # Two convolutions of width 4 reach 6 tokens back; further only the memory does.
    first = np.asarray(parallel(params, tokens().at[1, 0].add(1) % VOCAB))
    assert np.abs(first[1, -1] - before[1, -1]).max() > 1e-3


@pytest.mark.parametrize("rule", some_slow(["titans", "atlas", "of another kind"], ["titans"]))
def test_packed_row_is_its_documents(rule):
    graphdef, params, parallel = make(make_config(rule))
    ids = jnp.array(
        [[0] * 5 + [1] * 4 + [0] * 5, [3] * 5 + [4] * 5 + [7] * 4]
    )  # an id may return: still a new document
    packed = jax.jit(lambda p, x, ids: nnx.merge(graphdef, p)(x, ids, 4))(params, tokens(), ids)
    for row, cuts in enumerate([(0, 5, 9, 14), (0, 5, 10, 14)]):
        for start, stop in itertools.pairwise(cuts):
            # The document at the start of its row; what follows it has no influence, because the model is causal.
            alone = parallel(params, jnp.roll(tokens(), -start, axis=1))[row, : stop - start]
            np.testing.assert_allclose(packed[row, start:stop], alone, atol=2e-5, rtol=1e-4)


def test_outside_jit_a_call_is_compiled_once(compiled):
    """And is what it is under jit, with packed documents too."""
    graphdef, params, run = make(make_config("delta_rule"))
    model = nnx.merge(graphdef, params)
    ids = jnp.array([[0] * 5 + [1] * 9, [2] * 14])
    cache = model.init_cache(BATCH, 2 * TIME)
    calls = {
        "call": lambda: model(tokens()),
        "packed": lambda: model(tokens(), ids),
        "extend": lambda: model.extend(tokens(), cache)[0],
        "gradient": lambda: nnx.grad(lambda model: model(tokens()).mean())(model),
    }
    for call, outside in calls.items():
        outside()
        compiled.clear()
        outside()
        assert not compiled, call
    np.testing.assert_allclose(calls["call"](), run(params, tokens()), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(calls["extend"](), run(params, tokens()), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(calls["packed"]()[:1, 5:], model(tokens()[:1, 5:]), rtol=1e-4, atol=1e-4)
    model.of_a_user = {"not": "hashable"}
    np.testing.assert_allclose(calls["call"](), run(params, tokens()), rtol=1e-5, atol=1e-5)


@functools.cache
def loss_of(graphdef):
    def loss(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("rule", some_slow(MEMORIES, set(MEMORIES) - {"delta_rule"}))
def test_every_parameter_learns(rule):
    graphdef, params, _ = make(make_config(rule))
    _, gradients = loss_of(graphdef)(params, tokens())
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        per_layer = gradient.reshape(2, -1) if "layers" in jax.tree_util.keystr(path) else gradient.reshape(1, -1)
        assert np.all(np.isfinite(per_layer)), path
        assert np.all(np.abs(per_layer).max(axis=1) > 0), path


def graphdef_of(config):
    return nnx.split(abstract_model(config), nnx.Param)[0]


def test_remat_changes_nothing():
    graphdef, params, _ = make(make_config("delta_rule"))
    loss, gradients = loss_of(graphdef)(params, tokens())
    kept = graphdef_of(make_config("delta_rule", remat=False))
    kept_loss, kept_gradients = loss_of(kept)(params, tokens())
    np.testing.assert_allclose(kept_loss, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(kept_gradients), jax.tree.leaves(gradients)):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def test_bfloat16_is_close_to_float32():
    _, params, parallel = make(make_config("titans"))
    half = graphdef_of(make_config("titans", dtype="bfloat16"))
    expected = np.asarray(parallel(params, tokens()))
    got = jax.jit(lambda p, x: nnx.merge(half, p)(x))(params, tokens())
    assert got.dtype == jnp.float32
    assert np.sqrt(np.mean((np.asarray(got) - expected) ** 2)) < 0.03 * expected.std()
    assert not np.array_equal(got, expected)
    cache = jax.eval_shape(lambda p: nnx.merge(half, p).init_cache(1), params)
    assert cache.conv.dtype == jnp.bfloat16
    assert cache.memory.memory["W1"].dtype == jnp.float32


def stream(graphdef, params, cuts):
    """Logits of `tokens()` read in pieces."""
    extend = jax.jit(lambda p, x, cache: nnx.merge(graphdef, p).extend(x, cache))
    return streamed(functools.partial(extend, params), tokens(), nnx.merge(graphdef, params).init_cache(BATCH), cuts)[0]


def test_a_pattern_is_its_layers_in_turn():
    """A pattern of twice the same mixer is the model of that mixer, with every second layer in one stack."""
    _, params, parallel = make(make_config("delta_rule", num_layers=4))
    expected = parallel(params, tokens())
    pattern = graphdef_of(make_config("delta_rule", num_layers=4, mixer=("memory", "memory")))
    whole = nnx.to_pure_dict(params)
    whole["layers"] = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i::2], whole["layers"]) for i in range(2)}
    split = nnx.State(whole)
    found = jax.jit(lambda p, x: nnx.merge(pattern, p)(x))(split, tokens())
    # Two programs, in which XLA fuses differently: the same numbers up to rounding.
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max(), rtol=0)
    np.testing.assert_allclose(stream(pattern, split, [0, 7, 14]), expected, atol=2e-5, rtol=1e-4)
    axes = nnx.to_pure_dict(logical_axes(make_config("delta_rule", num_layers=4, mixer=("memory", "memory"))))
    assert axes["layers"]["layer_1"]["mixer"]["out"]["kernel"] == jax.sharding.PartitionSpec("layers", "heads", "embed")


def test_layers_without_feed_forward_norm_or_residual():
    """ffn="none" is a SwiGLU that adds nothing; a bare layer is its mixer alone."""
    _, params, parallel = make(make_config("delta_rule"))
    whole = nnx.to_pure_dict(params)
    whole["layers"]["mlp"] = jax.tree.map(jnp.zeros_like, whole["layers"]["mlp"])
    expected = parallel(nnx.State(whole), tokens())
    short = graphdef_of(make_config("delta_rule", ffn="none"))
    del whole["layers"]["mlp"], whole["layers"]["mlp_norm"]
    np.testing.assert_allclose(nnx.merge(short, nnx.State(whole))(tokens()), expected, rtol=1e-6, atol=1e-6)

    bare_config = make_config("delta_rule", ffn="none", block="bare")
    bare, params, parallel = make(bare_config)
    assert set(nnx.to_pure_dict(params)["layers"]) == {"mixer"}
    model = nnx.merge(bare, params)
    x = model.embedding[...][tokens()]
    for i in range(2):
        one = jax.tree.map(lambda p, i=i: p[i], nnx.split(model.layers.mixer, nnx.Param)[1])
        x = nnx.merge(nnx.split(model.layers.mixer, nnx.Param)[0], one)(x)
    expected = model.logits(model.norm(x))
    np.testing.assert_allclose(parallel(params, tokens()), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stream(bare, params, [0, 7, 14]), expected, rtol=1e-4, atol=1e-5)


def test_values_wider_than_keys():
    graphdef, params, parallel = make(make_config("delta_rule", value_expansion=3))
    assert params["layers"]["mixer"]["memory"].weights["W"].get_value().shape == (2, 2, 24, 8)
    np.testing.assert_allclose(stream(graphdef, params, [0, 13, 14]), parallel(params, tokens()), atol=2e-5, rtol=1e-4)
    _, gradients = loss_of(graphdef)(params, tokens())
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradients["layers"]["mixer"]))
    with pytest.raises(ValueError, match=r"value_expansion=2 .* 'titans' .* memory\.structure=\"plain_mlp\""):
        abstract_model(make_config("titans", value_expansion=2))
    abstract_model(make_config("titans", value_expansion=2, memory=MemoryConfig("titans", structure="plain_mlp")))


def test_untied_head_learns_and_is_used():
    config = make_config("delta_rule", tie_embeddings=False)
    graphdef, params, parallel = make(config)
    _, gradients = loss_of(graphdef)(params, tokens())
    assert np.abs(gradients["head"]["kernel"].get_value()).max() > 0
    zero = jax.tree.map(jnp.zeros_like, params["head"]["kernel"])
    params["head"]["kernel"] = zero
    assert np.all(parallel(params, tokens()) == 0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rule", MEMORIES)
def test_every_parameter_names_its_axes(rule, tied):
    config = make_config(rule, tie_embeddings=tied)
    axes = logical_axes(config)
    params = nnx.split(abstract_model(config), nnx.Param)[1]
    assert jax.tree.structure(axes) == jax.tree.structure(params)
    for names, shape in zip(jax.tree.leaves(axes), jax.tree.leaves(params), strict=True):
        assert len(names) == len(shape.shape)
        assert all(name is None or name in AXES for name in names)
    assert tuple(axes["embedding"].get_value()) == ("vocab", "embed")
    mixer = axes["layers"]["mixer"]
    assert tuple(mixer["inputs"]["kernel"].get_value()) == ("layers", "embed", None, "heads")
    for names in jax.tree.leaves(mixer["memory"]):
        assert tuple(names[:2]) == ("layers", "heads")
    assert ("head" in axes) == (not tied)


def test_logical_axes_refuses_a_parameter_without_names():
    model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"kernel|bias"):
        logical_axes(model)


def test_layers_differ_and_initialization_is_reproducible():
    config = make_config("delta_rule")
    init = jax.jit(lambda key: nnx.split(LanguageModel(config, rngs=nnx.Rngs(params=key)), nnx.Param)[1])
    params, again, other = (init(jax.random.key(seed)) for seed in (0, 0, 1))
    kernel = params["layers"]["mixer"]["inputs"]["kernel"].get_value()
    assert kernel.dtype == jnp.float32
    assert not np.array_equal(kernel[0], kernel[1])
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again)))
    assert not np.array_equal(params["embedding"].get_value(), other["embedding"].get_value())


def test_tokens_outside_the_vocabulary_are_nan_under_jit():
    model = LanguageModel(make_config("delta_rule", mixer="attention", num_layers=1), rngs=nnx.Rngs(0))
    good, run = tokens(time=3), jax.jit(model)
    for wrong in (VOCAB, -1):
        logits = run(good.at[0, 1].set(wrong))
        assert np.isnan(logits[0, 1]).all()
        np.testing.assert_array_equal(logits[1], run(good)[1])


def test_bad_arguments_are_named():
    graphdef, params, _ = make(make_config("delta_rule"))
    model = nnx.merge(graphdef, params)
    with pytest.raises(TypeError, match="tokens must be integers, got float32"):
        model(jnp.zeros((1, 2)))
    with pytest.raises(TypeError, match=r"tokens must be an integer array \[batch, time\], got list"):
        model([[1, 2]])
    with pytest.raises(ValueError, match=r"tokens has shape \(3,\)"):
        model(jnp.zeros(3, jnp.int32))
    for wrong in (VOCAB, -1, 2**32):
        with pytest.raises(
            ValueError, match=rf"LanguageModel: tokens has the id {wrong}, must be ≥ 0 and below vocab_size={VOCAB}"
        ):
            model(np.array([[3, wrong, 2]]))
    with pytest.raises(ValueError, match=rf"extend: tokens has the id {VOCAB}"):
        model.extend(jnp.full((2, 1), VOCAB), model.init_cache(2))
    with pytest.raises(ValueError, match=r"LanguageModel: segment_ids must be ≥ 0 and below 2\^31, got 4294967296"):
        model(jnp.zeros((1, 3), jnp.int32), np.array([[0, 0, 2**32]]))
    with pytest.raises(ValueError, match=r"segment_ids has shape \(1, 2\), must be \[1, 3\]"):
        model(jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match=r"batch size \{2\}"):
        model.extend(jnp.zeros((1, 3), jnp.int32), model.init_cache(2))
    with pytest.raises(ValueError, match="batch_size"):
        model.init_cache(0)
    with pytest.raises(ValueError, match=r"max_length must be an integer ≥ 1 or None, got 2.5"):
        model.init_cache(1, 2.5)
    with pytest.raises(ValueError, match="Did you mean 'memory'"):
        LanguageModel(make_config("delta_rule", mixer="memry"), rngs=nnx.Rngs(0))


COPIED = {
    "mamba2": {"mixer": "mamba2", "ssm": SSMConfig(state_dim=48, head_dim=16)},
    "mamba3": {"mixer": "mamba3", "ssm": SSMConfig(state_dim=48, head_dim=16)},
    "attention": {"mixer": "attention"},
    "swa": {"mixer": "swa", "attention": AttentionConfig(window=40)},
    "mag": {"mixer": "mag", "attention": AttentionConfig(window=40), "memory": MEMORIES["delta_rule"]},
}


@pytest.mark.parametrize("name", some_slow(COPIED, {"mag"}))
@pytest.mark.parametrize(("batch", "dtype"), [(1, "float32"), if_slow(2, "float32"), (2, "bfloat16")])
def test_a_decoded_token_does_not_copy_the_states_of_all_layers(name, batch, dtype):
    """Of mixers that read their state twice in a step, and of caches. XLA writes into the donated cache."""
    config = ModelConfig(dim=32, num_layers=3, num_heads=2, ffn="none", dtype=dtype, **COPIED[name])
    made = LanguageModel(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(made)
    cache, token = made.init_cache(batch, 40), jnp.zeros((batch, 1), jnp.int32)
    step = jax.jit(lambda params, cache: nnx.merge(graphdef, params).extend(token, cache), donate_argnums=1)
    compiled = step.lower(params, cache).compile().as_text()
    leaves = jax.tree.leaves(cache)
    for states in (leaf for leaf in leaves if 2 * leaf.nbytes > max(leaf.nbytes for leaf in leaves)):
        shape = ",".join(map(str, states.shape))
        kind = {"float32": "f32", "bfloat16": "bf16"}[str(states.dtype)]
        assert f"{kind}[{shape}]" in compiled
        assert not re.search(rf"= {kind}\[{shape}\]\S* copy\(", compiled)


class ScaledAttention(AttentionMixer):
    """A user's subclass with an `extend` of its own, which what the library does in place must not pass by."""

    def __call__(self, x, segment_ids=None, max_segments=None):
        return 3 * super().__call__(x, segment_ids)

    def extend(self, x, state):
        y, state = super().extend(x, state)
        return 3 * y, state


@pytest.mark.parametrize("mixer", [ScaledAttention, "attention", ("mal", "swa", "attention")])
def test_caches_of_all_layers_in_place(mixer):
    """A subclass's own `extend` counts; in a pattern each layer has its own caches."""
    config = make_config("delta_rule", attention=AttentionConfig(window=5), mixer=mixer, num_layers=6)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(1), (BATCH, TIME), 0, VOCAB)
    extend = jax.jit(lambda params, tokens, cache: nnx.merge(graphdef, params).extend(tokens, cache))
    cuts = [0, 1, 2, 8, 9, 10, 11, 12, 13, 14]
    logits, _ = streamed(functools.partial(extend, params), tokens, model.init_cache(BATCH, TIME), cuts)
    expected = jax.jit(lambda params: nnx.merge(graphdef, params)(tokens))(params)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * float(jnp.abs(expected).max()))
