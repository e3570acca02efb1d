"""What training says of memories that grow: which, when, and what helps."""

import dataclasses
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from atlasjax.distributed import MeshConfig, global_batch, make_mesh
from atlasjax.nn import AttentionConfig, MemoryConfig
from atlasjax.nn.caching import CachingConfig
from atlasjax.train import NonFiniteError, OptimizerConfig, TrainConfig, jit_train_step, learner, train
from atlasjax.train import state as state_lib
from atlasjax.train import step as step_lib
from atlasjax.train.config import changes_on_resume
from atlasjax.train.optimizer import make_optimizer
from atlasjax.train.reports import metrics
from atlasjax.train.reports.watch import MemoryWatch, what_helps
from tests.memory.own_family import MovingSum
from tests.train.test_step import QUICK, make_batch, params_of
from tests.train.tiny import MODEL, config

UNBOUNDED = dataclasses.replace(
    MODEL, memory=MemoryConfig(rule="delta_rule", chunk_size=8, bounded=False, max_step=1e6)
)
TITANS = dataclasses.replace(MODEL, memory=MemoryConfig(rule="titans", chunk_size=8))
# XLA's default, which `tests/conftest.py` turns off: without it what is fused, and so the last bit, depends on the outputs.
# From jax 0.11 on there is no such choice.
_EMITTERS = "xla_cpu_use_fusion_emitters"
AS_USERS = QUICK | ({_EMITTERS: True} if _EMITTERS in os.environ["XLA_FLAGS"] else {})
DELTA = dataclasses.replace(MODEL, memory=MemoryConfig(rule="delta_rule", chunk_size=8))  # less to compile
HYBRID = {"attention": AttentionConfig(window=8, segment_size=8), "num_layers": 4}


def opening(monkeypatch, layer, head, rate):
    """Makes every training step also open the step-size gate of one head by a factor e^rate, as a run that goes wrong would."""

    def jitted(*arguments, **settings):
        step = jit_train_step(*arguments, **settings)

        def opens(path, leaf):
            gate = jax.tree_util.keystr(path) == "['layers']['mixer']['gates']['bias']"
            return leaf.at[layer, head].add(rate) if gate else leaf

        def both(state, batch):
            state, values = step(state, batch)
            params = jax.tree_util.tree_map_with_path(opens, state.params)
            return dataclasses.replace(state, params=params), values

        return both

    monkeypatch.setattr(learner, "jit_train_step", jitted)


def test_a_memory_that_grows_is_reported_before_anything_is_nan(tmp_path, monkeypatch, capsys):
    opening(monkeypatch, layer=1, head=0, rate=2.0)
    run = config(
        tmp_path, model=UNBOUNDED, steps=12, log_every=5, checkpoint_every=0,
        data_changes={"sequence_length": 64, "validation_fraction": 0.0},
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0),
    )  # fmt: skip
    with pytest.raises(NonFiniteError) as info:
        train(run)
    reported = [line for line in capsys.readouterr().out.splitlines() if "memories whose norm" in line]
    records = [r for r in metrics.read(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"]
    first = next(record for record in records if record["memory_norm/1"] > run.memory_norm_limit)
    assert reported[0].startswith(f"step {first['step']}: memories whose norm passed 32")
    assert f"layer 1, head 0: {first['memory_norm/1']:.4g}. What helps: --model.memory.bounded" in reported[0]
    assert all("layer 0" not in line for line in reported)
    assert first["loss"] is not None
    assert first["gradient_norm"] is not None
    assert records[-1]["step"] > first["step"]
    largest = max(record["memory_norm/1"] or 0.0 for record in records)
    assert f"The largest finite memory norm was {largest:.4g}, of layer 1, head 0, in step" in str(info.value)
    assert "What helps: --model.memory.bounded, which keeps memories from diverging; a lower optimizer." in str(
        info.value
    )


def test_metrics_hold_one_norm_a_layer(tmp_path):
    model = dataclasses.replace(TITANS, mixer=("swa", "memory"), attention=HYBRID["attention"])
    run = config(tmp_path, model=model, steps=1, data_changes={"validation_fraction": 0.0})
    train(run)
    (record,) = (r for r in metrics.read(tmp_path / "run/metrics.jsonl") if r["kind"] == "train")
    norms = {name: value for name, value in record.items() if "norm" in name}
    assert list(norms) == ["gradient_norm", "memory_norm/1"]
    assert all(0.1 < value < 10 for value in norms.values())


def test_a_model_without_memories_has_no_norms(tmp_path):
    model = dataclasses.replace(MODEL, mixer="attention")
    _, norms = jax.eval_shape(
        lambda params, tokens: state_lib.merge(state_lib.model_shapes(model)[0], params).observe(tokens),
        state_lib.model_shapes(model)[1], jax.ShapeDtypeStruct((2, 16), "int32"),
    )  # fmt: skip
    assert norms == {}
    assert MemoryWatch(model, 32.0).report(1, norms) is None
    assert MemoryWatch(model, 32.0).summary() == ""


class Measured(MovingSum):
    """A rule of another kind than the library's that says how large its memory is."""

    def weight_norm(self, state):
        return jnp.abs(state.sums).max(axis=-1)


@pytest.mark.parametrize(("rule", "count"), [(MovingSum, 0), (Measured, 1)])
def test_a_rule_of_another_kind_says_how_large_its_memory_is(rule, count):
    model = dataclasses.replace(MODEL, memory=MemoryConfig(f"{rule.__module__}:{rule.__name__}"), num_layers=1)
    graphdef, params = state_lib.model_shapes(model)
    observe = lambda params, tokens: state_lib.merge(graphdef, params).observe(tokens)
    _, norms = jax.eval_shape(observe, params, jax.ShapeDtypeStruct((2, 16), "int32"))
    assert [x.shape for x in norms.values()] == [(model.num_heads,)] * count
    assert what_helps(model) == "a lower --optimizer.learning-rate"


def expected_norms(model, params, tokens):
    """Layer by layer [heads], in NumPy, from the states of a stream."""
    lm = state_lib.merge(state_lib.model_shapes(model)[0], params)
    start = lm.init_cache(len(tokens), tokens.shape[1])
    _, cache = jax.jit(lm.extend).lower(tokens, start).compile(QUICK)(tokens, start)
    is_state = lambda x: isinstance(x, memory.MemoryState)
    state = next(x for x in jax.tree.leaves(cache, is_leaf=is_state) if is_state(x))
    weights = [np.asarray(w, np.float64) for w in state.memory.values()]
    each = [np.sqrt((w**2).sum((-2, -1)) / w.shape[-2]) for w in weights]  # [layers, batch, heads]
    return np.max(each, axis=(0, 2))


@pytest.mark.parametrize(
    "changes",
    [
        # Memories of layers are observed in the same way, with a cache or without.
        pytest.param({}, marks=pytest.mark.slow),
        {"mixer": "mac", **HYBRID, "memory": DELTA.memory},
        pytest.param({"mixer": "mag", **HYBRID}, marks=pytest.mark.slow),
        pytest.param({"mixer": "mal", **HYBRID}, marks=pytest.mark.slow),
        pytest.param(
            {"memory": dataclasses.replace(TITANS.memory, caching=CachingConfig(segment_size=8))},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["memory", "mac", "mag", "mal", "cached"],
)
def test_norms_are_those_of_the_last_memory(changes):
    model = dataclasses.replace(TITANS, **changes)
    params, tokens = params_of(model), jnp.asarray(make_batch()["inputs"])
    observe = lambda params, tokens: state_lib.merge(state_lib.model_shapes(model)[0], params).observe(tokens)
    _, norms = jax.jit(observe).lower(params, tokens).compile(QUICK)(params, tokens)
    assert list(norms) == list(range(model.num_layers))
    np.testing.assert_allclose(np.stack([*norms.values()]), expected_norms(model, params, tokens), rtol=1e-4)


def test_softmax_memories_have_none():
    model = dataclasses.replace(MODEL, memory=MemoryConfig(rule="dot"))
    graphdef, params = state_lib.model_shapes(model)
    tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    assert jax.eval_shape(lambda p, t: state_lib.merge(graphdef, p).observe(t), params, tokens)[1] == {}


@pytest.mark.parametrize("mixer", ["memory", "mac"])
def test_of_packed_documents_the_last_one_counts(mixer):
    """What is behind it, a segment or padding to whole segments, does not."""
    model = dataclasses.replace(DELTA, mixer=mixer, **HYBRID)
    graphdef, params = state_lib.model_shapes(model)[0], params_of(model)
    tokens = jnp.asarray(make_batch(rows=2)["inputs"])
    ids = jnp.repeat(jnp.arange(2), 8)[None].repeat(2, 0)
    observed = lambda *packed: jax.jit(lambda p, t: state_lib.merge(graphdef, p).observe(t, *packed)[1])
    run = lambda f, tokens: f.lower(params, tokens).compile(QUICK)(params, tokens)
    packed, alone = run(observed(ids, 4), tokens), run(observed(), tokens[:, 8:])
    for layer, norms in alone.items():
        np.testing.assert_allclose(packed[layer], norms, rtol=1e-5)


def stepped(mesh_shape, accumulation, options, model=TITANS):
    """(parameters after two steps, memory norms of each) of a model with memories."""
    mesh, settings = make_mesh(MeshConfig(*mesh_shape)), OptimizerConfig(learning_rate=1e-3, warmup_steps=0, eps=1e-3)
    optimizer = make_optimizer(settings, 10, jax.tree.map(lambda x: True, params_of(model)))
    graphdef, _ = state_lib.model_shapes(model)
    shardings, _ = state_lib.state_shardings(model, optimizer, mesh)
    init = jax.jit(lambda key: state_lib.init_state(model, optimizer, key), out_shardings=shardings)
    state = init.lower(jax.random.key(0)).compile(QUICK)(jax.random.key(0))
    step = jit_train_step(graphdef, optimizer, lambda step: step * 0.0, shardings, mesh, microbatches=accumulation)
    step = step.lower(state, global_batch(make_batch(), mesh)).compile(options)
    norms = []
    for i in range(2):
        state, values = step(state, global_batch(make_batch(seed=i), mesh))
        norms.append(jax.device_get(values["memory_norm"]))
    return jax.device_get(state.params), norms


@pytest.mark.parametrize("model", [DELTA, pytest.param(TITANS, marks=pytest.mark.slow)], ids=["delta_rule", "titans"])
def test_observation_changes_no_bit_of_what_is_trained(monkeypatch, model):
    observed, norms = stepped((1, 1, 1), 1, AS_USERS, model)
    with_norms = step_lib._observed_sums
    monkeypatch.setattr(
        step_lib, "_observed_sums", lambda *arguments: (*(seen := with_norms(*arguments))[:2], {}, seen[3])
    )
    unobserved, none = stepped((1, 1, 1), 1, AS_USERS, model)
    assert all(norms)
    assert none == [{}, {}]
    for one, other in zip(jax.tree.leaves(observed), jax.tree.leaves(unobserved), strict=True):
        np.testing.assert_array_equal(one, other)


def test_norms_are_the_same_on_a_mesh_and_in_microbatches():
    whole, parts = stepped((1, 1, 1), 1, QUICK, DELTA)[1], stepped((2, 2, 2), 2, QUICK, DELTA)[1]
    for norms, alike in zip(whole, parts, strict=True):
        assert list(norms) == list(alike) == [0, 1]
        for layer, heads in norms.items():
            np.testing.assert_allclose(alike[layer], heads, rtol=1e-5)


def test_a_head_is_reported_again_when_it_has_grown_fourfold():
    watch = MemoryWatch(TITANS, 32.0)
    report = lambda step, *heads: watch.report(step, {0: np.array([1.0, 2.0]), 3: np.array(heads)})
    assert report(1, 31.0, 32.0) is None
    assert not watch.suspected
    assert "step 2: memories whose norm passed 32" in report(2, 33.0, 5.0)
    assert watch.suspected
    assert report(3, 131.0, 6.0) is None
    assert "layer 3, head 1: 300; layer 3, head 0: 140." in report(4, 140.0, 300.0)
    assert report(5, 140.0, 300.0) is None


def test_what_is_not_finite_comes_first_and_once():
    watch = MemoryWatch(TITANS, 32.0)
    line = watch.report(7, {0: np.array([50.0, 2.0]), 1: np.array([math.inf, 70.0]), 2: np.array([math.nan, math.nan])})
    expected = (
        "layer 1, head 0: inf; layer 2, head 0: nan; layer 2, head 1: nan; layer 1, head 1: 70; layer 0, head 0: 50."
    )
    assert expected in line
    assert watch.report(8, {1: np.array([math.nan, 70.0])}) is None
    assert watch.summary().startswith(
        "The first memory that was not finite is that of layer 1, head 0, in step 7. The largest finite memory norm was 70, of "
        "layer 1, head 1, in step 7"
    )


def test_memories_are_not_suspected_where_all_broke_at_once():
    watch = MemoryWatch(TITANS, 32.0)
    watch.report(1, {0: np.array([1.0, 1.0])})
    watch.report(2, {0: np.array([math.nan, math.nan])})
    assert not watch.suspected


def test_memories_that_only_add_may_be_large():
    watch = MemoryWatch(MODEL, 32.0)  # linear attention
    assert watch.report(1, {0: np.array([50.0, 1000.0])}) is None
    assert "memories that are not finite: layer 0, head 0: nan. What helps" in watch.report(
        2, {0: np.array([math.nan, 99.0])}
    )


def test_a_line_has_an_end():
    line = MemoryWatch(TITANS, 32.0).report(1, {0: np.full(100, 99.0)})
    assert "; and 92 more. What helps:" in line
    assert line.count("head") == 8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": "titans"}, r"^a lower --model.memory.max-step \(it is 0.\d+\)$"),
        ({"rule": "titans", "max_step": 0.25}, r"max-step \(it is 0.25\)"),
        ({"rule": "titans", "bounded": False}, "^--model.memory.bounded, "),
        ({"rule": "titans", "bounded": False, "caching": CachingConfig()}, "^--model.memory.bounded, "),
        ({"rule": "linear_attention", "bounded": False}, "^a lower --model.memory.max-step"),
        ({"rule": "rwkv7"}, "^a lower --optimizer.learning-rate$"),
    ],
)
def test_what_helps(settings, words):
    import re

    assert re.search(words, what_helps(dataclasses.replace(MODEL, memory=MemoryConfig(**settings))))


def test_a_run_may_go_on_with_what_helps():
    old, new = (
        {"model": {"memory": {"bounded": False, "max_step": None}}},
        {"model": {"memory": {"bounded": True, "max_step": 0.1}}},
    )
    assert changes_on_resume(old, new) == (
        [], [], ["model.memory.bounded: False → True", "model.memory.max_step: None → 0.1"],
    )  # fmt: skip


def test_the_limit_must_be_positive():
    with pytest.raises(ValueError, match=r"memory_norm_limit is 0\.0; it must be positive"):
        TrainConfig(model=MODEL, memory_norm_limit=0.0)
