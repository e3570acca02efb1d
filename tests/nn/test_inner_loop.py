"""The inner loop of a model (TTT-E2E, and HOPE's continuum memory system) against its definition in float64, and its streams."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import AttentionConfig, InnerLoopConfig, LanguageModel, ModelConfig, check_divided
from atlasjax.nn.model import InnerCache
from atlasjax.train import state as state_lib
from tests.comparisons import close

VOCAB, DIM, WINDOW, CHUNK, TIME = 7, 4, 4, 3, 10
INNER = InnerLoopConfig(layers=2, periods=(CHUNK, 2 * CHUNK), learning_rate=0.1, clip=0.3, mlp_dim=5)
CONFIG = ModelConfig(
    vocab_size=VOCAB, dim=DIM, num_layers=3, num_heads=2, mixer="swa", attention=AttentionConfig(window=WINDOW), mlp_dim=6,
    inner_loop=INNER, dtype="float32",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, TIME), 0, VOCAB)


@pytest.fixture(scope="module")
def logits(model, tokens):
    return np.asarray(model(tokens))


def norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + CONFIG.norm_eps) * scale


def swiglu(x, gate_and_wide, out):
    """Of tokens [time, dim] with weights of their own, [time, …], or with the same for all."""
    times = lambda x, w: jnp.einsum("td,tde->te" if w.ndim == 3 else "td,de->te", x, w)
    return times(jax.nn.silu(times(x, gate_and_wide[..., 0, :])) * times(x, gate_and_wide[..., 1, :]), out)


def attention(x, params):
    """Of one sequence [time, dim], over a window and with RoPE."""
    size, heads = DIM // 2, []
    for head in range(2):
        q, k, v = jnp.split(x @ params["attention"]["inputs"]["kernel"][:, head], 3, -1)
        t = jnp.arange(len(x))
        angle = t * 1.0  # one pair of channels, whose wavelength is 2 π
        turn = lambda z, c=jnp.cos(angle), s=jnp.sin(angle): jnp.stack(
            [z[:, 0] * c - z[:, 1] * s, z[:, 1] * c + z[:, 0] * s], -1
        )
        seen = (t[:, None] >= t) & (t[:, None] - t < WINDOW)
        heads.append(jax.nn.softmax(jnp.where(seen, turn(q) @ turn(k).T / size**0.5, -jnp.inf)) @ v)
    return jnp.concatenate(heads, -1) @ params["out"]["kernel"]


def definition(params, tokens):
    """Logits of one sequence. Every chunk reads all tokens again, each with the fast weights of its chunk."""
    inner, chunks = params["inner"]["layers"], -(-len(tokens) // CHUNK)
    initial = [inner[f"fast_{j}"]["mlp"] for j in range(len(INNER.periods))]  # [layers, …]
    own_chunk = jnp.arange(len(tokens)) // CHUNK

    def layer(x, params, fast):
        x = x + attention(norm(x, params["mixer_norm"]["scale"]), params["mixer"])
        for j, weights in enumerate(fast):
            own = params[f"fast_{j}"]
            each = [w["kernel"][own_chunk] for w in (weights["gate_and_wide"], weights["out"])]
            x = x + norm(swiglu(norm(x, own["norm"]["scale"]), *each), own["post_norm"]["scale"])
        z = norm(x, params["mlp_norm"]["scale"])
        return x + swiglu(z, params["mlp"]["gate_and_wide"]["kernel"], params["mlp"]["out"]["kernel"])

    def run(history):
        """The logits, with the fast weights of every chunk [chunks, layers, …]."""
        x = layer(params["embedding"][tokens], jax.tree.map(lambda x: x[0], params["layers"]), [])
        for i in range(INNER.layers):
            fast = jax.tree.map(lambda w, i=i: w[:, i], history)
            x = layer(x, jax.tree.map(lambda x, i=i: x[i], inner), fast)
        return norm(x, params["norm"]["scale"]) @ params["embedding"].T

    def loss(weights, history, chunk):
        y = run(jax.tree.map(lambda all_, w: all_.at[chunk].set(w), history, weights))
        losses = -jax.nn.log_softmax(y)[jnp.arange(len(tokens)), jnp.roll(tokens, -1)]
        return jnp.sum(jnp.where(own_chunk == chunk, losses, 0.0)) / CHUNK

    def step(carry, chunk):
        history, kept = carry
        weights = jax.tree.map(lambda w: w[chunk], history)
        gradients = jax.grad(loss)(weights, history, chunk)
        kept = jax.tree.map(jnp.add, kept, gradients)
        for j, period in enumerate(INNER.periods):
            mean = jax.tree.map(lambda g, n=period // CHUNK: g / n, kept[j])
            size = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(mean)))
            due = (chunk + 1) % (period // CHUNK) == 0
            factor = jnp.where(due, INNER.learning_rate * jnp.minimum(1, INNER.clip / size), 0.0)
            weights[j] = jax.tree.map(lambda w, g, f=factor: w - f * g, weights[j], mean)
            kept[j] = jax.tree.map(lambda g, due=due: jnp.where(due, 0.0, g), kept[j])
        return (jax.tree.map(lambda all_, w: all_.at[chunk + 1].set(w), history, weights), kept), None

    start = jax.tree.map(lambda w: jnp.stack([w] * chunks), initial)
    kept = jax.tree.map(jnp.zeros_like, initial)
    (history, _), _ = jax.lax.scan(step, (start, kept), jnp.arange(chunks - 1))
    return run(history)


def test_values_and_outer_gradients_are_those_of_the_definition(model, tokens, logits):
    graphdef, state = nnx.split(model, nnx.Param)
    params, weights = state_lib.pure(state), np.random.default_rng(0).normal(size=logits.shape)

    def ours(params):
        return jnp.sum(state_lib.merge(graphdef, params)(tokens) * jnp.asarray(weights, jnp.float32))

    gradient = jax.jit(jax.grad(ours))(params)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)

        def theirs(params):
            y = jax.vmap(lambda row: definition(params, row))(tokens)
            return jnp.sum(y * weights), y

        expected, values = jax.jit(jax.grad(theirs, has_aux=True))(exact)
    close(logits, values, 1e-4)
    close(gradient, expected, 2e-4)


def read(model, tokens, cache, pieces):
    ys, start = [], 0
    for length in pieces:
        y, cache = model.extend(tokens[:, start : start + length], cache)
        ys.append(np.asarray(y))
        start += length
    return np.concatenate(ys, axis=1), cache


@pytest.mark.parametrize("pieces", [(1,) * TIME, (4, 4, 1, 1), (1, 4, 4, 1), (1, 1, 4, 4)], ids=str)
def test_a_stream_of_any_pieces(model, tokens, logits, pieces):
    y, cache = read(model, tokens, model.init_cache(2), pieces)
    np.testing.assert_allclose(y, logits, atol=1e-4 * np.abs(logits).max())
    assert isinstance(cache, InnerCache)
    assert len({x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)}) == len(jax.tree.leaves(cache))


def test_a_fresh_cache_has_every_array_once(model):
    leaves = jax.tree.leaves(model.init_cache(2))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)  # `generate` donates them


def test_rows_of_a_stream_may_be_at_different_places(model, tokens, logits):
    rows = [read(model, tokens, model.init_cache(2), (1,) * count)[1] for count in (4, 5)]
    cache = jax.tree.map(lambda a, b: jnp.stack([a[:, 0], b[:, 1]], axis=1), *rows)
    shifted = jnp.stack([tokens[0, 4:9], tokens[1, 5:10]])
    y = read(model, shifted, cache, (4, 1))[0]
    expected = np.stack([logits[0, 4:9], logits[1, 5:10]])
    np.testing.assert_allclose(y, expected, atol=1e-4 * np.abs(logits).max())


def test_packed_documents_have_weights_of_their_own(model, tokens, logits):
    alone = np.asarray(model(tokens[:, :5]))
    packed = jnp.concatenate([tokens[:, :5], tokens[:, :5]], axis=1)
    ids = jnp.repeat(jnp.array([[3, 1]]), 5, axis=1)
    y = np.asarray(model(packed, jnp.broadcast_to(ids, packed.shape), 2))
    np.testing.assert_allclose(y, np.concatenate([alone, alone], axis=1), atol=1e-4 * np.abs(logits).max())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixer": ("swa", "mamba", "swa")}, "pattern of several"),
        ({"num_layers": 2}, "num_layers=2 leaves no layer before the 2"),
        ({"dropout": 0.1}, "dropout=0.1 would make"),
        ({"inner_loop": (3,)}, "inner_loop must be"),
    ],
    ids=str,
)
def test_models_without_an_inner_loop(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"periods": (4, 6)}, "all be multiples of the shortest, 4"),
        ({"periods": ()}, "must be a tuple"),
        ({"clip": 0.0}, "clip"),
        ({"layers": 0}, "layers"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        InnerLoopConfig(**fields)


def test_values_of_the_first_layer_are_refused():
    config = dataclasses.replace(CONFIG, mixer="rwkv7")
    with pytest.raises(
        ValueError, match=r"mixer='rwkv7' uses the values of the first layer; give rwkv7\.value_residual=False"
    ):
        LanguageModel(config, rngs=nnx.Rngs(0))


def test_tokens_of_a_sequence_are_not_divided():
    with pytest.raises(ValueError, match=r"mesh\.sequence is 2, but model\.inner_loop takes a step after every chunk"):
        check_divided(CONFIG, 2)


def test_a_sequence_without_a_step_is_refused():
    with pytest.raises(
        ValueError, match=r"data\.sequence_length is 3; it must be above the shortest of model\.inner_loop\.periods"
    ):
        INNER.check_length(3, "data.sequence_length")
