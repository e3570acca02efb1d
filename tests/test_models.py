"""One suite over all architectures, each as small as it can be: what every model promises, whatever its mixer.

Compilation is what it costs, so each model compiles four functions of fixed shapes, and all tests share them: the parallel pass, a
piece and a token of a stream, and the sharded training step. Every architecture of one name is here; of the backbones around a rule
only the combinations in `BACKBONES_COVERED`, one of each, since tests/nn has the backbones themselves; so too of cached memories.
By default the models in `DECODED` and `TRAINED` run, one for each kind of state and of step; every other model runs with `-m slow`.
Every mixer is in them or in tests/nn (`test_every_mixer_is_decoded_and_trained`), and every rule in tests/memory. Gradients of the
sharded against the unsharded step are compared for `GRADIENTS_COVERED`, Orbax's files are written for three.
"""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.distributed import MeshConfig, global_batch, make_mesh
from atlasjax.nn import ModelConfig, logical_axes
from atlasjax.presets import ARCHITECTURES, BACKBONES, preset_names
from atlasjax.train import OptimizerConfig
from atlasjax.train import state as state_lib
from atlasjax.train.optimizer import decay_mask, learning_rate, make_optimizer
from atlasjax.train.saving.checkpoint import Checkpoints
from atlasjax.train.step import accumulated_gradients, jit_train_step
from experiments.packing.models import VOCAB, small
from tests.comparisons import close
from tests.marks import some_slow
from tests.nn.cases import BASELINES, BLOCK_MEMORIES, BLOCK_RECURRENCES, HYBRIDS, LATENT
from tests.streams import streamed

BATCH, TIME = 8, 48
PIECE = 37  # of a stream; no multiple of a chunk or a window
STEPS = 30
LONG = 1024
LONGEST = 4096  # with `-m slow`

# Models that differ from another in one field, which the tests of their mixer cover.
VARIANTS = ("gam-sum", "gam-global", "gam-local", "elastic-uniform", "elastic-uniform-mid")
CACHED_COVERED = (
    "linear-attention-residual",
    "titans-grm",
    "omeganet-soup",
    "dla-ssc",
    "gated-delta-rule-ssc",
    "titans-log-linear",
)
BACKBONES_COVERED = ("titans-mac", "delta-rule-mac", "delta-rule-mag", "atlas-mag", "delta-rule-mal")
GRADIENTS_COVERED = ("transformer++", "gated-deltanet-h2", "gated-deltanet", "mamba", "delta-rule", "titans", "gam")
# What runs by default.
DECODED = (
    "transformer++", "mamba", "gam", "memorizing", "infini", "elastic-exp", "block-attention", "gated-delta-rule",
    "linear-attention-residual",
)  # fmt: skip
TRAINED = ("transformer++", "mamba", "gam", "elastic-exp", "gated-delta-rule")
GRADIENTS = ("transformer++", "gam")  # those of a memory are in tests/train/test_step.py


def _covered(name: str) -> bool:
    if name in VARIANTS:
        return False
    if "caching" in ARCHITECTURES[name]:
        return name in CACHED_COVERED
    suffix = name.rpartition("-")[2]
    return suffix not in BACKBONES or name in BACKBONES_COVERED


MODELS = [name for preset in preset_names("tiny") if _covered(name := preset.removesuffix("-tiny"))]


pytestmark = pytest.mark.usefixtures("compile_fast")


def smaller(name: str) -> ModelConfig:
    """`small`, with each mixer of its pattern once with each of its feed-forward networks."""
    config = small(f"{name}-tiny")
    mixers, networks = zip(*dict.fromkeys(zip(config.pattern, config.ffns)))
    return dataclasses.replace(
        config, mixer=mixers if len(mixers) > 1 else mixers[0], ffn=networks, num_layers=max(2, len(mixers))
    )


@functools.cache
def text() -> np.ndarray:
    """Real text as ASCII codes: the embedded text, [batches, BATCH, TIME + 1]."""
    from pydoc_data.topics import topics

    codes = np.frombuffer("\n".join(topics[key] for key in sorted(topics)).encode("ascii", "ignore"), np.uint8)
    length = (STEPS + 1) * BATCH * (TIME + 1)
    return codes[20_000 : 20_000 + length].reshape(STEPS + 1, BATCH, TIME + 1).astype(np.int32)


def batch(number: int) -> dict[str, np.ndarray]:
    rows = text()[number]
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:], "weights": np.ones((BATCH, TIME), np.float32)}


class Model:
    """A small model with its compiled functions."""

    def __init__(self, name: str):
        self.config = smaller(name)
        self.graphdef, _ = state_lib.model_shapes(self.config)
        self.params = jax.jit(lambda key: state_lib.init_params(self.config, key))(jax.random.key(0))
        merge = lambda params: state_lib.merge(self.graphdef, params)
        self.parallel = jax.jit(lambda params, tokens: merge(params)(tokens))
        self.extend = jax.jit(lambda params, tokens, cache: merge(params).extend(tokens, cache))
        self.cache = lambda length, rows=BATCH: merge(self.params).init_cache(rows, length)
        settings = OptimizerConfig(learning_rate=1e-2, warmup_steps=3)
        mask = decay_mask(state_lib.pure(logical_axes(self.config)))
        self.optimizer = make_optimizer(settings, STEPS, mask)
        self.mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2))
        self.shardings, self.skipped = state_lib.state_shardings(self.config, self.optimizer, self.mesh)
        self.step = jit_train_step(
            self.graphdef, self.optimizer, learning_rate(settings, STEPS), self.shardings, self.mesh
        )

    @functools.cached_property
    def trained(self) -> tuple[state_lib.TrainState, list[float]]:
        """The state after STEPS sharded steps on real text, and the loss of each."""
        start = jax.jit(
            lambda params: state_lib.TrainState(
                params, self.optimizer.init(params), jax.random.key(0), jnp.zeros((), jnp.int32)
            ),
            out_shardings=self.shardings,
        )
        state = start(self.params)
        losses = []
        for number in range(STEPS):
            state, metrics = self.step(state, global_batch(batch(number), self.mesh))
            losses.append(float(metrics["loss"]))
        return state, losses

    def loss(self, params, number: int) -> float:
        """The mean cross entropy of a batch by the parallel pass on one device."""
        logits = np.asarray(self.parallel(params, batch(number)["inputs"]), np.float64)
        exponents = logits - logits.max(-1, keepdims=True)
        log_probabilities = exponents - np.log(np.exp(exponents).sum(-1, keepdims=True))
        return -float(np.take_along_axis(log_probabilities, batch(number)["targets"][..., None], -1).mean())


@functools.lru_cache(maxsize=2)
def model(name: str) -> Model:
    return Model(name)


def each_model(names, default=DECODED):
    """The tests of one model run one after another, in one worker: `run_together`. Then its compiled functions can be dropped."""
    return pytest.mark.parametrize("name", some_slow(names, set(names) - set(default)), scope="module")


@each_model(MODELS)
class TestModel:
    def test_decoded_is_parallel(self, name):
        m, tokens = model(name), batch(0)["inputs"]
        expected = np.asarray(m.parallel(m.params, tokens))
        assert np.std(expected) > 0.1
        extend = functools.partial(m.extend, m.params)
        found, _ = streamed(extend, tokens, m.cache(TIME), [0, *range(PIECE, TIME + 1)])
        close(found, expected, 2e-5)

    def test_rows_are_independent_and_the_future_unseen(self, name):
        m, tokens = model(name), batch(0)["inputs"].copy()
        before = np.asarray(m.parallel(m.params, tokens))
        tokens[3, 20:] = (tokens[3, 20:] + 1) % VOCAB
        after = np.asarray(m.parallel(m.params, tokens))
        others = np.arange(BATCH) != 3
        np.testing.assert_array_equal(after[others], before[others])
        scale = np.abs(before).max()
        np.testing.assert_allclose(after[3, :20], before[3, :20], atol=2e-6 * scale, rtol=0)
        assert np.abs(after[3, 20:] - before[3, 20:]).max() > 0.1 * scale

    def test_checkpoint_round_trip(self, name):
        """Every leaf has a path of its own, and the abstract state says what they are: all that is needed to restore them."""
        m = model(name)
        leaves = jax.tree_util.tree_leaves_with_path(m.params)
        arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}
        assert len(arrays) == len(leaves)
        file = io.BytesIO()
        np.savez(file, **arrays)
        file.seek(0)
        saved = np.load(file)
        _, shapes = state_lib.model_shapes(m.config)

        def restore(path, shape):
            array = saved[jax.tree_util.keystr(path, simple=True, separator="/")]
            assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
            return jnp.asarray(array)

        restored = jax.tree_util.tree_map_with_path(restore, shapes)
        tokens = batch(1)["inputs"]
        np.testing.assert_array_equal(m.parallel(restored, tokens), m.parallel(m.params, tokens))


def stays_finite(name, tokens):
    m = model(name)
    length = -(-tokens // PIECE) * PIECE
    shapes = lambda length: jax.tree.map(jnp.shape, jax.eval_shape(lambda: m.cache(length)))
    # One row, where each piece reads all that was kept: the square of the length, times the rows.
    rows = BATCH if shapes(TIME) == shapes(length) else 1
    rng, cache = np.random.default_rng(1), m.cache(length, rows)
    sizes, largest = jax.tree.map(jnp.shape, cache), []
    for _ in range(length // PIECE):
        piece = rng.integers(0, VOCAB, (rows, PIECE), dtype=np.int32)
        logits, cache = m.extend(m.params, piece, cache)
        largest.append(float(jnp.max(jnp.abs(logits))))
    assert np.isfinite(largest).all()
    assert np.max(largest[-10:]) < 3 * np.max(largest[:10])
    assert jax.tree.map(jnp.shape, cache) == sizes
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.floating))


# Memories of other rules read as many and more tokens in tests/nn/test_gates.py.
@each_model(MODELS)
def test_finite_after_many_random_tokens(name):
    stays_finite(name, LONG)


@pytest.mark.slow
@each_model(MODELS)
def test_finite_after_thousands_of_random_tokens(name):
    stays_finite(name, LONGEST)


@each_model(MODELS, TRAINED)
def test_loss_falls_and_sharded_is_unsharded(name):
    m = model(name)
    state, losses = m.trained
    assert losses[0] == pytest.approx(m.loss(m.params, 0), rel=2e-5)
    final = jax.device_get(state.params)
    copy = jax.device_put(jax.device_get(state), m.shardings)  # the step gives its argument up
    _, metrics = m.step(copy, global_batch(batch(STEPS), m.mesh))
    assert float(metrics["loss"]) == pytest.approx(m.loss(final, STEPS), rel=2e-5)
    assert any("tensor" in str(x.spec) for x in jax.tree.leaves(m.shardings.params))
    assert np.mean(losses[-5:]) < losses[0] - 1.0


@each_model(GRADIENTS_COVERED, GRADIENTS)
def test_sharded_gradients_are_unsharded(name):
    m = model(name)
    gradients = lambda params, rows: accumulated_gradients(m.graphdef, params, rows, 1)[1]
    expected = jax.jit(gradients)(m.params, batch(0))
    sharded = jax.jit(gradients, out_shardings=m.shardings.params)
    found = sharded(jax.device_put(m.params, m.shardings.params), global_batch(batch(0), m.mesh))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        scale = max(float(jnp.abs(a).max()), 1e-5)
        np.testing.assert_allclose(a, b, atol=1e-4 * scale, rtol=0, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow  # tests/train/test_checkpoint.py writes and reads checkpoints on meshes, test_resume.py goes on from them
@each_model(["gated-deltanet-h2", "gated-delta-rule", "atlas"])
def test_orbax_round_trip(name, tmp_path):
    m = model(name)
    state, _ = m.trained
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state, [None], {})
        checkpoints.wait()
        restored = checkpoints.restore(state_lib.abstract_state(m.config, m.optimizer, m.shardings))
    assert restored.step == STEPS
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(restored.state.params), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    copy = jax.device_put(jax.device_get(state), m.shardings)
    follow = [m.step(s, global_batch(batch(STEPS), m.mesh))[1]["loss"] for s in (copy, restored.state)]
    assert float(follow[0]) == float(follow[1])


def test_every_mixer_is_decoded_and_trained():
    """By default: here, or as a layer or a model in tests/nn."""
    assert set((*BACKBONES_COVERED, *DECODED, *TRAINED)) <= set(MODELS)
    assert set(GRADIENTS) <= set(GRADIENTS_COVERED) <= set(MODELS)
    assert len(MODELS) >= 30
    patterns = {name: ARCHITECTURES[name]["mixer"] for name in MODELS}
    mixers = lambda names: {
        part for name in names for x in np.atleast_1d(patterns[name]).tolist() for part in x.split("+")
    }
    in_nn = {*BASELINES, *HYBRIDS, *LATENT, *BLOCK_RECURRENCES}
    assert mixers(MODELS) <= mixers(DECODED) | in_nn
    # Attention within blocks trains as the part of "elastic" that it is.
    assert mixers(MODELS) <= mixers(TRAINED) | in_nn | {*BLOCK_MEMORIES, "block_attention"}
