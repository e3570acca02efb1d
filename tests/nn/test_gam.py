"""Models of Gated Associative Memory's paper: published sizes, the whole model's formula, learned positions, dropout, reach."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from atlasjax.data import DataConfig
from atlasjax.distributed import MeshConfig, global_batch, make_mesh
from atlasjax.evaluate.lm import evaluate_stream
from atlasjax.generate import generate
from atlasjax.nn import LanguageModel, PositionedCache, count_parameters, logical_axes
from atlasjax.train import TrainConfig, jit_train_step, loss_sums
from atlasjax.train import state as state_lib
from atlasjax.train.optimizer import decay_mask
from atlasjax.train.setup import prepare
from experiments.gam.models import MODELS, PARAMETERS
from tests.comparisons import close
from tests.streams import streamed

BATCH, TIME, VOCAB = 2, 14, 17


pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.mark.parametrize("name", MODELS)
def test_published_parameter_counts(name):
    assert count_parameters(MODELS[name]) == PARAMETERS[name]


def small(name, **changes):
    config = MODELS[name]
    sizes = {"vocab_size": VOCAB, "dim": 8, "num_layers": 2, "num_heads": 2, "max_positions": TIME, "mlp_dim": 12}
    return dataclasses.replace(config, **sizes | {"gam": dataclasses.replace(config.gam, slots=5)} | changes)


@functools.cache
def make(config):
    """(graphdef, params, jitted parallel pass), every parameter moved off its initial value: zeros and ones hide mistakes."""
    graphdef, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), params)
    return graphdef, params, jax.jit(lambda p, *args: nnx.merge(graphdef, p)(*args))


def tokens(time=TIME):
    return jax.random.randint(jax.random.key(0), (BATCH, time), 0, VOCAB)


def layer_norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def gam_formula(x, p):
    padded = np.concatenate([np.zeros((2, x.shape[1])), x])
    local = sum(padded[j : j + len(x)] * p["kernel"][j] for j in range(3)) + p["bias"]
    gates = 1 / (1 + np.exp(-(np.tensordot(x, p["gate_kernel"], 1) + p["gate_bias"])))
    return gates[:, 0] * local + gates[:, 1] * (softmax(x @ p["memory"].T) @ p["memory"])


def attention_formula(x, p):
    inputs = np.tensordot(x, p["attention"]["inputs"]["kernel"], 1) + p["attention"]["inputs"]["bias"]
    q, k, v = np.split(inputs, 3, axis=-1)
    logits = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1])
    weights = softmax(np.where(np.tril(np.ones((len(x), len(x)))), logits, -np.inf))
    y = np.einsum("hts,shd->thd", weights, v).reshape(len(x), -1)
    return y @ p["out"]["kernel"] + p["out"]["bias"]


def model_formula(params, row, mix):
    """Logits of one row [time], float64: G §3 and §4.1."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    x = p["embedding"][row] + p["positions"][: len(row)]
    for i in range(2):
        layer = jax.tree.map(lambda x, i=i: x[i], p["layers"])
        x = x + mix(layer_norm(x, layer["mixer_norm"]), layer["mixer"])
        wide, out = layer["mlp"]["wide"], layer["mlp"]["out"]
        h = layer_norm(x, layer["mlp_norm"]) @ wide["kernel"] + wide["bias"]
        x = x + h * (1 + np.vectorize(math.erf)(h / np.sqrt(2))) / 2 @ out["kernel"] + out["bias"]
    return layer_norm(x, p["norm"]) @ p["embedding"].T


@pytest.mark.parametrize(("name", "mix"), [("gam", gam_formula), ("transformer", attention_formula)])
def test_model_is_its_formula(name, mix):
    _, params, parallel = make(small(name))
    close(parallel(params, tokens()), np.stack([model_formula(params, row, mix) for row in np.asarray(tokens())]))


@pytest.mark.parametrize("name", ["gam", "transformer"])
def test_stream_and_packed_documents_count_positions(name):
    """Streamed = parallel, NaN where the table ends; a document in a row has the positions of a row of its own."""
    graphdef, params, parallel = make(small(name))
    model = nnx.merge(graphdef, params)
    expected = parallel(params, tokens())
    extend = jax.jit(lambda p, x, cache: nnx.merge(graphdef, p).extend(x, cache))
    empty = model.init_cache(BATCH, 20)
    logits, cache = streamed(functools.partial(extend, params), tokens(), empty, (0, 5, 6, TIME))
    close(logits, expected)
    assert isinstance(cache, PositionedCache)
    np.testing.assert_array_equal(cache.position, [[TIME] * BATCH])
    beyond, _ = extend(params, tokens()[:, :1], cache)
    assert np.all(np.isnan(beyond))

    ids = jnp.array([[0] * 6 + [1] * 8, [0] * 14])
    packed = parallel(params, tokens(), ids, 2)
    close(packed[0, 6:], parallel(params, jnp.roll(tokens(), -6, axis=1))[0, :8])
    close(packed[1], expected[1])


def test_more_tokens_than_positions_are_refused_before_anything_is_compiled():
    graphdef, params, parallel = make(small("gam"))
    model = nnx.merge(graphdef, params)
    with pytest.raises(ValueError, match=r"LanguageModel: 15 tokens, .* max_positions=14"):
        parallel(params, tokens(15))
    with pytest.raises(ValueError, match=r"prompt and num_tokens: 15 tokens, .* max_positions=14"):
        generate(model, np.asarray(tokens(10)), 5)
    with pytest.raises(ValueError, match=r"tokens: 15 tokens, .* max_positions=14"):
        evaluate_stream(model, np.zeros(16, np.int32), np.ones(VOCAB, np.int32))
    assert generate(model, np.asarray(tokens(10)), 4).shape == (BATCH, 4)
    config = TrainConfig(small("gam", vocab_size=256), DataConfig(sequence_length=15), mesh=MeshConfig(data=1))
    with pytest.raises(ValueError, match=r"data.sequence_length is 15; .* model.max_positions, which is 14"):
        prepare(config)


def test_every_parameter_learns_and_the_right_ones_decay():
    config = small("gam")
    graphdef, params, _ = make(config)
    gradients = jax.jit(jax.grad(lambda p: (nnx.merge(graphdef, p)(tokens()) ** 2).sum()))(params)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(gradient).max() > 0, path
    decayed = jax.tree_util.tree_leaves_with_path(decay_mask(state_lib.pure(logical_axes(config))))
    names = {jax.tree_util.keystr(path, simple=True, separator=".") for path, decays in decayed if decays}
    mixer = {"layers.mixer.memory", "layers.mixer.gate_kernel"}
    assert names == {"embedding", "layers.mlp.wide.kernel", "layers.mlp.out.kernel"} | mixer


@pytest.mark.parametrize(("name", "field"), [("gam", 13), ("gam-local", 13), ("gam-global", 1)])
def test_reach_of_the_papers_model(name, field):
    """Six layers: the last logits do not change at all when a token outside the field does, whatever the parameters are."""
    _, params, parallel = make(small(name, num_layers=6, max_positions=16, mlp_dim=8))
    rows = jnp.broadcast_to(tokens(16)[:1], (17, 16))
    changed = rows.at[jnp.arange(16), jnp.arange(16)].add(1) % VOCAB  # row i has another token i; the last row has not
    last = np.asarray(parallel(params, changed)[:, -1])
    differs = np.any(last[:16] != last[16], axis=-1)
    np.testing.assert_array_equal(differs, np.arange(16) >= 16 - field)


def batch_of(rows):
    x = np.asarray(jax.random.randint(jax.random.key(5), (rows, TIME + 1), 0, VOCAB))
    return {"inputs": x[:, :-1], "targets": x[:, 1:], "weights": np.ones((rows, TIME), np.float32)}


def test_dropout_drops_embeddings_and_outputs_of_the_feed_forward_networks():
    """In a model that adds nothing else, what is dropped is seen one place at a time."""
    config = small("gam-global", dropout=0.5)
    graphdef, params, parallel = make(config)
    model, keys = nnx.merge(graphdef, params), jax.random.split(jax.random.key(1), BATCH)
    run = jax.jit(lambda p, x, keys: nnx.merge(graphdef, p)(x, dropout_keys=keys))
    dropped = run(params, tokens(), keys)
    assert np.abs(dropped - parallel(params, tokens())).max() > 0.1
    # Rows by their own keys: neither neighbours nor their order matter.
    close(run(params, tokens()[::-1], keys[::-1])[::-1], dropped, 1e-6)
    # The same places of the last layer's output are dropped whatever goes in, and only those.
    silent = nnx.to_pure_dict(params)
    silent["layers"] = jax.tree.map(jnp.zeros_like, silent["layers"])
    silent["layers"]["mlp"]["out"]["bias"] = jnp.ones_like(silent["layers"]["mlp"]["out"]["bias"])
    silent["embedding"], silent["positions"] = jnp.zeros((VOCAB, 8)), jnp.zeros((TIME, 8))
    quiet = nnx.merge(graphdef, nnx.State(silent))
    quiet.norm = lambda x: x
    residual = np.asarray(quiet.hidden(tokens(), dropout_keys=keys))
    assert set(np.unique(residual)) == {0.0, 2.0, 4.0}  # two layers, each adds 0 or 1 / (1 − 0.5)
    silent["layers"]["mlp"]["out"]["bias"] *= 0
    silent["embedding"] = jnp.ones((VOCAB, 8))
    quiet = nnx.merge(graphdef, nnx.State(silent))
    quiet.norm = lambda x: x
    embedded = np.asarray(quiet.hidden(tokens(), dropout_keys=keys))
    assert set(np.unique(embedded)) == {0.0, 2.0}
    assert not np.array_equal(embedded, residual[..., :] > 0)
    with pytest.raises(ValueError, match=r"dropout_keys is uint32 \(2,\), must be typed PRNG keys"):
        model(tokens(), dropout_keys=jax.random.PRNGKey(0))


def test_training_drops_by_the_step_and_not_by_microbatch_or_mesh():
    config = small("gam", dropout=0.3, mixer=("gam", "gam"), remat=True)
    graphdef, params, _ = make(config)
    batch, optimizer = batch_of(4), optax.sgd(0.0)  # so that steps differ in what they drop alone
    shardings, _ = state_lib.state_shardings(config, optimizer, mesh := make_mesh(MeshConfig(data=2, fsdp=1, tensor=1)))
    step = lambda mesh, n: jit_train_step(graphdef, optimizer, lambda n: n * 0.0, shardings, mesh, microbatches=n)
    start = state_lib.TrainState(
        state_lib.pure(params), optimizer.init(state_lib.pure(params)), jax.random.key(9), jnp.zeros((), jnp.int32)
    )

    def run(step, mesh, numbers):
        found = []
        for number in numbers:
            state = dataclasses.replace(jax.tree.map(jnp.copy, start), step=jnp.int32(number))
            _, metrics = step(jax.device_put(state, shardings), global_batch(batch, mesh))
            found.append([float(metrics["loss"]), float(metrics["gradient_norm"])])
        return np.array(found)

    in_parts = run(step(mesh, 2), mesh, [0, 1, 2, 1])
    assert len(set(in_parts[:3, 0])) == 3
    np.testing.assert_array_equal(in_parts[1], in_parts[3])  # a step says what it drops, not what ran before it
    keys = jax.random.split(jax.random.fold_in(start.key, 1), 4)
    loss = lambda p, keys: loss_sums(graphdef, p, {**batch, "dropout_keys": keys})[0] / batch["weights"].sum()
    value, gradient = jax.jit(jax.value_and_grad(loss))(start.params, keys)
    np.testing.assert_allclose(in_parts[1], [value, optax.tree.norm(gradient)], rtol=1e-5)
    assert abs(value - loss(start.params, None)) > 1e-3
