"""Configurations: JSON round trip, overrides of a rule, and errors that name the thing."""

import dataclasses
import json

import pytest

from atlasjax import rules
from atlasjax.config_json import from_dict, to_dict
from atlasjax.memory import features, structures
from atlasjax.nn import (
    AttentionConfig,
    GAMConfig,
    GatedDeltaNetConfig,
    HeadNormConfig,
    InfiniConfig,
    KDAConfig,
    Mamba3Config,
    MelodiConfig,
    MemorizingConfig,
    MemoryConfig,
    ModelConfig,
    SSMConfig,
)

CONFIGS = [
    ModelConfig(),
    ModelConfig(dim=96, num_heads=3, head_dim=40, mlp_dim=100, tie_embeddings=False, remat=False, dtype="float32"),
    ModelConfig(
        memory=MemoryConfig("omeganet", chunk_size=8, window=2, structure="gated_mlp", expansion=2, max_step=0.1)
    ),
    ModelConfig(memory=MemoryConfig("atlas", features="sketch", degree=3, sketch_size=32, newton_schulz_every=4)),
    ModelConfig(
        mixer=("mamba", "swa"),
        ffn="none",
        block="bare",
        value_expansion=2,
        ssm=SSMConfig(8, 3, 16, 2, 4),
        head_norm=HeadNormConfig(shared=True, eps=1e-4),
        attention=AttentionConfig(window=16, rope_theta=5e5, persistent_tokens=2, segment_size=32),
    ),
    ModelConfig(
        mixer=("memorizing", "infini", "melodi", "swa"),
        memorizing=MemorizingConfig(8, 16),
        infini=InfiniConfig(32),
        melodi=MelodiConfig(4, 64),
    ),
    ModelConfig(
        mixer=("gam", "attention"),
        ffn="gelu",
        norm="layer",
        positions="learned",
        max_positions=256,
        dropout=0.1,
        gam=GAMConfig(slots=64, fusion="sum", conv_width=2),
        attention=AttentionConfig(rope_theta=None, bias=True),
    ),
    ModelConfig(
        mixer=("gated_deltanet", "attention"),
        norm="rms_plus_one",
        block=("pre_norm", "post_norm"),
        gated_deltanet=GatedDeltaNetConfig(value_heads=8, negative_eigenvalues=True),
        mamba3=Mamba3Config(rank=4, rope_fraction=1.0, output_norm=True),
        attention=AttentionConfig(
            num_heads=6,
            kv_heads=2,
            head_dim=16,
            value_dim=8,
            rope_dim=4,
            qk_norm="all",
            gate=True,
            bias=True,
            output_bias=False,
        ),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip_through_json(config):
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert hash(config) == hash(from_dict(ModelConfig, to_dict(config)))


@pytest.mark.parametrize("rule", rules.REGISTRY)
def test_no_override_is_the_rule_itself(rule):
    assert MemoryConfig(rule).build() == rules.REGISTRY[rule]()


def test_overrides_reach_the_rule():
    built = MemoryConfig(
        "atlas", chunk_size=32, window=3, structure="mlp", depth=3, expansion=2, features="elementwise", degree=3,
        newton_schulz_steps=4, newton_schulz_every=8, newton_schulz_schedule="polar_express",
    ).build()  # fmt: skip
    assert built == rules.atlas(32, 3, structures.MLP(3, 2), features.Powers(3), 4, 8, "polar_express")
    assert MemoryConfig("omeganet", degree=3).build() == rules.omeganet(features=features.Polynomial(3))
    assert MemoryConfig("titans", depth=3).build() == rules.titans(structure=structures.MLP(3))
    assert MemoryConfig("titans", structure="matrix").build() == rules.titans(structure=structures.Matrix())
    assert MemoryConfig("dla", features="elementwise", degree=3).build() == rules.dla(features=features.Powers(3))
    assert MemoryConfig("titans", features="polynomial").build() == rules.titans(features=features.Polynomial(2))
    assert MemoryConfig("dot", normalized=False).build() == dataclasses.replace(rules.dot(), normalized=False)
    assert MemoryConfig("ttt_mlp", expansion=2).build() == rules.ttt_mlp(expansion=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MemoryConfig("atlass"), ["memory rule", "atlass", "Did you mean 'atlas'"]),
        (lambda: MemoryConfig("titans", window=4), ["titans", "window=4", "chunk_size"]),
        (lambda: MemoryConfig("delta_rule", features="polynomial"), ["delta_rule", "features='polynomial'"]),
        (lambda: MemoryConfig("ttt_linear", expansion=2), ["ttt_linear", "expansion=2"]),
        (lambda: MemoryConfig("titans", normalized=False), ["titans", "normalized=False"]),
        (lambda: MemoryConfig("titans", degree=2), ["titans", "degree=2", "identity"]),
        (lambda: MemoryConfig("titans", newton_schulz_steps=5), ["titans", "newton_schulz_steps=5"]),
        (lambda: MemoryConfig("swla", depth=3), ["swla", "depth=3", "matrix"]),
        (lambda: MemoryConfig("atlas", features="identity", degree=3), ["degree=3", "identity"]),
        (lambda: MemoryConfig("atlas", features="polynomail"), ["Did you mean 'polynomial'"]),
        (lambda: MemoryConfig("atlas", structure="mpl"), ["Did you mean 'mlp'"]),
        (lambda: MemoryConfig("atlas", chunk_size=10, newton_schulz_every=4), ["every", "chunk_size=10"]),
        (lambda: MemoryConfig("titans", chunk_size=0), ["chunk_size", "0"]),
        (lambda: MemoryConfig("titans", max_step=0.0), ["max_step", "0.0"]),
        (lambda: ModelConfig(dim=100, num_heads=3), ["num_heads=3", "dim=100", "head_dim"]),
        (lambda: ModelConfig(num_layers=0), ["num_layers", "0"]),
        (lambda: ModelConfig(mlp_dim=-1), ["mlp_dim", "-1"]),
        (lambda: ModelConfig(dim=True), ["dim", "True"]),
        (lambda: ModelConfig(dtype="float16"), ["dtype", "bfloat16", "float16"]),
        (lambda: ModelConfig(norm_eps=0.0), ["norm_eps", "0.0"]),
        (lambda: ModelConfig(remat=1), ["remat", "1"]),
        (lambda: ModelConfig(memory="atlas"), ["memory", "MemoryConfig", "'atlas'"]),
        (lambda: AttentionConfig(window=0), ["AttentionConfig", "window", "0"]),
        (lambda: AttentionConfig(rope_theta=-1.0), ["rope_theta", "-1.0"]),
        (lambda: AttentionConfig(persistent_tokens=-1), ["persistent_tokens", "≥ 0", "-1"]),
        (lambda: SSMConfig(expand=0), ["SSMConfig", "expand", "0"]),
        (lambda: HeadNormConfig(eps=0.0), ["HeadNormConfig", "eps", "0"]),
        (lambda: HeadNormConfig(shared=1), ["HeadNormConfig", "shared", "1"]),
        (lambda: AttentionConfig(bias=1), ["AttentionConfig", "bias", "1"]),
        (lambda: GAMConfig(slots=0), ["GAMConfig", "slots", "0"]),
        (lambda: GAMConfig(fusion="gatd"), ["fusion", "Did you mean 'gated'"]),
        (lambda: GAMConfig(conv_width=2.0), ["GAMConfig", "conv_width", "2.0"]),
        (lambda: AttentionConfig(kv_heads=0), ["AttentionConfig", "kv_heads", "0"]),
        (lambda: AttentionConfig(qk_norm="heads"), ["qk_norm", "'none' or 'head' or 'all'", "'heads'"]),
        (lambda: AttentionConfig(gate=1), ["AttentionConfig", "gate", "1"]),
        (lambda: GatedDeltaNetConfig(value_heads=0), ["GatedDeltaNetConfig", "value_heads", "0"]),
        (lambda: KDAConfig(value_heads=0), ["KDAConfig", "value_heads", "0"]),
        (lambda: KDAConfig(lower_bound=0.0), ["KDAConfig", "lower_bound", "< 0", "0.0"]),
        (lambda: KDAConfig(rank=-1), ["KDAConfig", "rank", "-1"]),
        (lambda: KDAConfig(gate_bias=1), ["KDAConfig", "gate_bias", "1"]),
        (lambda: Mamba3Config(rank=0), ["Mamba3Config", "rank", "0"]),
        (lambda: Mamba3Config(rope_fraction=0.25), ["Mamba3Config", "rope_fraction", "0.5 or 1.0", "0.25"]),
        (lambda: Mamba3Config(output_norm=1), ["Mamba3Config", "output_norm", "1"]),
        (lambda: ModelConfig(norm="batch"), ["norm", "'rms' or 'rms_plus_one' or 'layer'", "'batch'"]),
        (lambda: ModelConfig(positions="learned"), ["positions='learned'", "max_positions", "None"]),
        (lambda: ModelConfig(max_positions=8), ["positions='none'", "max_positions to be None", "8"]),
        (lambda: ModelConfig(positions="learned", max_positions=0), ["max_positions", "≥ 1", "0"]),
        (lambda: ModelConfig(dropout=1.0), ["dropout", "[0, 1)", "1.0"]),
        (lambda: MemorizingConfig(queue_length=0), ["MemorizingConfig", "queue_length", "0"]),
        (lambda: MelodiConfig(block_size=2.0), ["MelodiConfig", "block_size", "2.0"]),
        (lambda: InfiniConfig(block_size=True), ["InfiniConfig", "block_size", "True"]),
        (lambda: ModelConfig(melodi=InfiniConfig()), ["melodi", "MelodiConfig"]),
        (lambda: ModelConfig(gam={"slots": 3}), ["gam", "GAMConfig"]),
        (lambda: ModelConfig(value_expansion=0), ["value_expansion", "0"]),
        (
            lambda: ModelConfig(ffn="relu"),
            ["ffn", "'swiglu' or 'gelu' or 'relu2' or 'channel_mixing' or 'experts' or 'none'", "'relu'"],
        ),
        (lambda: ModelConfig(block="bare"), ["block='bare'", "ffn='none'", "'swiglu'"]),
        (lambda: ModelConfig(block="norm"), ["block", "'pre_norm' or 'post_norm' or 'bare'", "'norm'"]),
        (lambda: ModelConfig(block=("pre_norm",) * 2), ["block", "for 2 layers", "the 1 of the pattern"]),
        (lambda: ModelConfig(block=("bare",)), ["each one of block", "'pre_norm' or 'post_norm'", "'bare'"]),
        (lambda: ModelConfig(mixer=("memory",) * 3), ["pattern of 3", "num_layers=4"]),
        (lambda: ModelConfig(mixer=()), ["pattern of 0", "num_layers=4"]),
        (lambda: ModelConfig(mixer=["memory"]), ["tuple of names", "['memory']"]),
        (lambda: ModelConfig(mixer=("memory", 2)), ["tuple of names", "2"]),
        (lambda: from_dict(ModelConfig, {"mixer": ["mamba", 2]}), ["ModelConfig.mixer[1]", "str", "2"]),
        (lambda: from_dict(ModelConfig, {"mixer": 2}), ["ModelConfig.mixer", "str or a list of str", "2"]),
        (lambda: from_dict(ModelConfig, {"num_layer": 3}), ["field of ModelConfig", "Did you mean 'num_layers'"]),
        (
            lambda: from_dict(ModelConfig, {"memory": {"chunksize": 3}}),
            ["field of MemoryConfig", "Did you mean 'chunk_size'"],
        ),
        (lambda: from_dict(ModelConfig, {"num_layers": "3"}), ["ModelConfig.num_layers", "int", "'3'"]),
        (lambda: from_dict(ModelConfig, {"memory": {"window": 2.5}}), ["MemoryConfig.window", "int or None", "2.5"]),
        (lambda: from_dict(ModelConfig, {"dtype": "half"}), ["ModelConfig.dtype", "'bfloat16'", "'half'"]),
        (lambda: from_dict(ModelConfig, {"memory": "atlas"}), ["MemoryConfig", "'atlas'"]),
    ],
)
def test_errors_name_what_is_wrong(make, words):
    with pytest.raises(ValueError) as error:
        make()
    for word in words:
        assert word in str(error.value)


def test_derived_sizes_follow_a_replaced_field():
    wider = dataclasses.replace(ModelConfig(dim=128), dim=1024)
    assert (wider.resolved_head_dim, wider.resolved_mlp_dim) == (256, 2816)
    assert dataclasses.replace(wider, head_dim=48, mlp_dim=7).resolved_head_dim == 48
