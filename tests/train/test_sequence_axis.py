"""The mesh axis `sequence`: one training step whose tokens are divided over devices is that of one device."""

import dataclasses
import functools
import re

import chex
import jax
import numpy as np
import pytest

from atlasjax.data import DataConfig
from atlasjax.distributed import MeshConfig, global_batch, make_mesh
from atlasjax.nn import (
    MIXERS,
    AttentionConfig,
    BranchConfig,
    CachingConfig,
    DeltaProductConfig,
    GatedDeltaNetConfig,
    KDAConfig,
    LaCTConfig,
    MemoryConfig,
    ModelConfig,
    RWKV7Config,
    SSMConfig,
    check_divided,
    logical_axes,
)
from atlasjax.train import LossConfig, OptimizerConfig, TrainConfig, fits, jit_train_step, train
from atlasjax.train import state as state_lib
from atlasjax.train.optimizer import decay_mask, learning_rate, make_optimizer
from tests.marks import some_slow
from tests.train.tiny import config

pytestmark = pytest.mark.usefixtures("compile_fast")

QUICK = {"xla_backend_optimization_level": 0}
LENGTH, SEGMENTS = 32, 6
PLAIN = ModelConfig(
    dim=32, num_layers=1, num_heads=2, mlp_dim=32, mixer="gated_deltanet", dtype="float32",
    # Longer than a part of 8 or 4 tokens: keys come from several devices.
    attention=AttentionConfig(window=11, kv_heads=1, persistent_tokens=2), ssm=SSMConfig(head_dim=16, state_dim=8),
)  # fmt: skip
model = functools.partial(dataclasses.replace, PLAIN)
HYBRID = model(
    mixer=("rwkv7", "gated_deltanet", "attention", "swa"), num_layers=4, ffn="channel_mixing", norm="layer",
    rwkv7=RWKV7Config(value_residual=True), embedding_norm=True,
)  # fmt: skip
CACHING = CachingConfig(segment_size=4)
MODELS = {
    "hybrid": HYBRID,
    "gated_deltanet": model(gated_deltanet=GatedDeltaNetConfig(value_heads=4, negative_eigenvalues=True)),
    "kda": model(mixer="kda", kda=KDAConfig(value_heads=4, lower_bound=-5.0)),
    "gdn2": model(mixer="gdn2", kda=KDAConfig(value_heads=4, negative_eigenvalues=True)),
    "gated_deltaproduct": model(mixer="gated_deltaproduct", gated_deltaproduct=DeltaProductConfig(writes=3)),
    "comba": model(mixer="comba"),
    "gla": model(mixer="gla"),
    "retnet": model(mixer="retnet"),
    "deltanet": model(mixer="deltanet"),
    "mamba2": model(mixer="mamba2", ffn="none"),
    "rwkv7": model(mixer="rwkv7", num_layers=2, rwkv7=RWKV7Config(value_residual=True), ffn="channel_mixing"),
    "transformer": model(mixer="attention", positions="learned", max_positions=LENGTH, dropout=0.1),
    "samba": model(mixer=("mamba2", "swa"), num_layers=2),
    "branch": model(mixer="gla", branch=BranchConfig("memory", memory=MemoryConfig(rule="delta_rule"))),
    "mag": model(mixer="mag", attention=AttentionConfig(window=11), memory=MemoryConfig(rule="delta_rule")),
    "mal": model(mixer="mal", attention=AttentionConfig(window=40), memory=MemoryConfig(rule="gla")),
    "titans-grm": model(mixer="memory", memory=MemoryConfig(rule="titans", chunk_size=2, caching=CACHING)),
    "lact": model(
        mixer="lact", attention=AttentionConfig(window=11), lact=LaCTConfig(2, chunk_size=12, rank=4, schedule=None)
    ),
    "mag-ssc": model(
        mixer="mag", attention=AttentionConfig(window=11),
        memory=MemoryConfig(rule="titans", chunk_size=4, caching=dataclasses.replace(CACHING, aggregation="ssc")),
    ),
    "gla-residual": model(mixer="gla", caching=dataclasses.replace(CACHING, aggregation="residual")),
}  # fmt: skip


def make_batch(packed: bool, rows: int = 4) -> dict[str, np.ndarray]:
    """Rows of documents of any length: some are longer than a device's part, and some devices have several."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 256, (rows, LENGTH + 1)).astype(np.int32)
    weights = (rng.random((rows, LENGTH)) < 0.8).astype(np.float32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    if packed:
        starts = np.zeros((rows, LENGTH), np.int32)
        for row, at in enumerate([(5, 6, 20), (8, 16), (), (3, 9, 15, 16, 31)]):
            starts[row, list(at)] = 1
        batch["segment_ids"] = np.cumsum(starts, axis=1)
    return batch


def one_step(model: ModelConfig, mesh_config: MeshConfig, packed: bool, microbatches: int = 1):
    """(metrics, Adam's first moments, parameters) after a step. The moments are the gradients, scaled."""
    mesh = make_mesh(mesh_config)
    settings = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, eps=1e-3)
    optimizer = make_optimizer(settings, 10, decay_mask(state_lib.pure(logical_axes(model))))
    graphdef, _ = state_lib.model_shapes(model)
    shardings, _ = state_lib.state_shardings(model, optimizer, mesh)
    init = jax.jit(lambda key: state_lib.init_state(model, optimizer, key), out_shardings=shardings)
    state = init.lower(jax.random.key(0)).compile(QUICK)(jax.random.key(0))
    batch = global_batch(make_batch(packed), mesh)
    step = jit_train_step(
        graphdef, optimizer, learning_rate(settings, 10), shardings, mesh, microbatches=microbatches,
        max_segments=SEGMENTS if packed else None, loss=LossConfig(chunk=3),
    )  # fmt: skip
    state, metrics = step.lower(state, batch).compile(QUICK)(state, batch)
    moments = next(
        x.mu for x in jax.tree.leaves(state.optimizer, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu")
    )
    return jax.device_get((metrics, moments, state.params))


@functools.cache
def on_one_device(name: str, packed: bool):
    return one_step(MODELS[name], MeshConfig(1), packed)


UNPACKED = ("titans-grm", "mag-ssc", "gla-residual", "lact")  # their documents are not divided
CASES = [  # model, mesh, packed documents, microbatches
    ("gla", MeshConfig(2, sequence=4), True, 1),
    ("titans-grm", MeshConfig(2, sequence=4), False, 1),
    ("hybrid", MeshConfig(2, sequence=4), True, 1),
    ("hybrid", MeshConfig(1, sequence=8), False, 1),
    ("hybrid", MeshConfig(1, 2, 2, 2), True, 2),
    *((name, MeshConfig(2, sequence=4), True, 1) for name in MODELS if name not in ("hybrid", "gla", *UNPACKED)),
    *((name, MeshConfig(1, sequence=8), False, 1) for name in MODELS if name != "hybrid"),
]


# The others compile training steps of larger models, and many.
@pytest.mark.parametrize(
    "case", some_slow(CASES, CASES[1:]), ids=lambda case: f"{case[0]}-{case[1].sequence}-{case[2]}"
)
def test_a_step_is_that_of_one_device(case):
    name, mesh, packed, microbatches = case
    metrics, gradients, params = on_one_device(name, packed)
    found, found_gradients, found_params = one_step(MODELS[name], mesh, packed, microbatches)
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["gradient_norm"], metrics["gradient_norm"], rtol=1e-4)
    chex.assert_trees_all_close(found["memory_norm"], metrics["memory_norm"], rtol=1e-4)
    chex.assert_trees_all_close(found_gradients, gradients, rtol=1e-3, atol=2e-6)
    chex.assert_trees_all_close(found_params, params, rtol=1e-3, atol=2e-5)


# Compiles two training steps of longer sequences.
@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gated_deltanet", "rwkv7", "mamba2", ("gla", "swa")])
def test_memory_is_flat_when_length_and_devices_grow_together(mixer):
    """And no device gets as many tokens of an array as the sequence has."""
    wide = model(mixer=mixer, num_layers=2, dim=64, ffn="channel_mixing" if mixer == "rwkv7" else "swiglu")
    small, large = (compiled_step(wide, 256 * devices, devices) for devices in (2, 8))
    assert large.memory_analysis().temp_size_in_bytes < 1.1 * small.memory_analysis().temp_size_in_bytes
    received = COLLECTIVE.findall(large.as_text())
    assert any("all-gather" in line for line in received)
    assert not [line for line in received if re.search(rf"\b{256 * 8}\b", line)]


COLLECTIVE = re.compile(r"= .*? (?:all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def compiled_step(model: ModelConfig, length: int, devices: int) -> jax.stages.Compiled:
    mesh = make_mesh(MeshConfig(1, sequence=devices))
    settings = OptimizerConfig()
    optimizer = make_optimizer(settings, 10, decay_mask(state_lib.pure(logical_axes(model))))
    graphdef, _ = state_lib.model_shapes(model)
    shardings, _ = state_lib.state_shardings(model, optimizer, mesh)
    state = state_lib.abstract_state(model, optimizer, shardings)
    batch = {name: jax.ShapeDtypeStruct((1, length), x.dtype) for name, x in make_batch(False).items()}
    step = jit_train_step(graphdef, optimizer, learning_rate(settings, 10), shardings, mesh, loss=LossConfig(chunk=64))
    return step.lower(state, batch).compile()


@pytest.mark.parametrize(
    ("mixer", "changes", "words"),
    [
        ("memory", {}, r"mixer 'memory' with rule 'atlas' .*: its memory after a part of the sequence is not a linear function"),
        ("gla", {"branch": BranchConfig("memory")}, "mixer 'memory' with rule .*: its memory after a part"),
        ("mac", {}, "mixer 'mac' with rule 'atlas' cannot be divided over devices: it has no form for a part of a sequence"),
        ("mamba", {}, "mixer 'mamba' cannot be divided over devices: it has no form for a part of a sequence"),
        ("longhorn", {}, "mixer 'longhorn' .*: its step sizes per channel give each row"),
        ("log_linear_mamba2", {}, "mixer 'log_linear_mamba2' .*: it has no form"),
        (("gla", "gam"), {"num_layers": 2}, "mixer 'gam' cannot be divided over devices: it has no form"),
        ("gla", {"caching": CachingConfig(start="carry")}, "mixer 'gla' .*: its segments continue from each other"),
        ("gla", {"caching": CachingConfig("log_linear")}, "mixer 'gla' .*: the rule has no form for a part of the sequence"),
    ],
)  # fmt: skip
def test_mixers_that_are_not_divided(mixer, changes, words):
    config = model(mixer=mixer, **{"attention": AttentionConfig(window=4, segment_size=64), **changes})
    with pytest.raises(ValueError, match=rf"mesh.sequence is 2, but the tokens of {words}"):
        check_divided(config, 2)
    check_divided(config, 1)


@pytest.mark.parametrize("in_branch", [False, True])
def test_truncation_is_refused(in_branch):
    of_memory = MemoryConfig(rule="gated_delta_rule", truncation=64)
    branch = BranchConfig("memory", memory=of_memory)
    config = model(mixer="gla", branch=branch) if in_branch else model(mixer="memory", memory=of_memory)
    with pytest.raises(
        ValueError, match=r"mesh.sequence is 2, but memory.truncation of mixer 'memory' is 64; give None"
    ):
        check_divided(config, 2, 128)
    check_divided(config, 1, 128)


def test_every_other_mixer_of_the_tests_above_is_divided():
    for each in MODELS.values():
        check_divided(each, 4)
    divided = {name for each in MODELS.values() for name in each.pattern}
    assert divided == {
        "memory",
        "attention",
        "swa",
        "mag",
        "mal",
        "mamba2",
        "retnet",
        "gla",
        "deltanet",
        "gated_deltanet",
        "gated_deltaproduct",
        "comba",
        "kda",
        "gdn2",
        "rwkv7",
        "lact",
    }
    assert divided < set(MIXERS)


def test_cached_segments_that_the_axis_does_not_divide(tmp_path):
    make = functools.partial(config, tmp_path, model=MODELS["titans-grm"], mesh=MeshConfig(1, sequence=4))
    with pytest.raises(
        ValueError, match=r"mesh.sequence: 40 tokens in 4 parts; the tokens of each must be a multiple of 4"
    ):
        train(make(data_changes={"sequence_length": 40}))
    with pytest.raises(ValueError, match=r"mesh.sequence cannot divide packed documents for CachedRule"):
        train(make(data_changes={"sequence_length": 32, "packing": "documents"}))


def test_a_length_that_the_axis_does_not_divide(tmp_path):
    run = config(tmp_path, model=PLAIN, mesh=MeshConfig(1, sequence=4), data_changes={"sequence_length": 30})
    with pytest.raises(
        ValueError, match=r"data.sequence_length is 30; it must be divisible by mesh.sequence, which is 4"
    ):
        train(run)


def test_activations_count_as_far_as_a_device_holds_them():
    data = DataConfig(sequence_length=2**20, batch_size=1)
    run = TrainConfig(model(num_layers=8, dim=512, dtype="bfloat16"), data, accumulation=1)
    with pytest.raises(ValueError, match="; or a larger mesh"):
        fits.check_fits(run, {"data": 1, "fsdp": 1, "tensor": 1}, 10**7, 2**30)
    fits.check_fits(run, {"data": 1, "fsdp": 1, "sequence": 64, "tensor": 1}, 10**7, 2**30)
