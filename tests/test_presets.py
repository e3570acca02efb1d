"""Presets: names, sizes, and what is known of them without allocating them."""

import subprocess
import sys

import jax
import pytest
from flax import nnx

from atlasjax import presets, rules
from atlasjax.nn import LanguageModel, MelodiConfig, MemorizingConfig, count_parameters
from atlasjax.nn.mixers import MIXERS
from atlasjax.train import default_config
from tests.marks import some_slow

# The models of ATLAS's tables.
PAPER = [
    "transformer++", "swa", "retnet", "gla", "deltanet", "gated-deltanet", "gated-deltanet-h2", "ttt-linear", "ttt-mlp",
    "mamba", "mamba2", "samba", "rwkv7", "longhorn", "moneta", "yaad", "memora", "titans", "titans-lmm", "dla", "swla",
    "deep-transformer", "swdt", "dot", "omeganet", "atlas", "atlas++",
]  # fmt: skip


def test_names():
    assert set(PAPER) <= set(presets.ARCHITECTURES)
    for rule in rules.REGISTRY:
        for suffix in presets.BACKBONES:
            assert f"{presets.rule_name(rule)}-{suffix}" in presets.ARCHITECTURES
    assert set(presets.PRESETS) == {
        f"{architecture}-{size}"
        for architecture in presets.ARCHITECTURES
        for size in ("tiny", "170m", "340m", "760m", "1.3b")
    } | {f"{architecture}-{size}" for size, published in presets.PUBLISHED.items() for architecture in published}
    names = presets.preset_names("tiny")
    assert "titans-tiny" in names
    assert "titans-lmm-tiny" not in names
    assert "retnet-lmm-tiny" in names  # the rule alone; retnet-tiny is the published model
    assert presets.get_preset("titans-lmm-tiny") == presets.get_preset("titans-tiny")
    assert presets.preset_names("22m") == [f"{name}-22m" for name in presets.PUBLISHED["22m"]]
    assert set(presets.preset_names("345m")) <= set(presets.PRESETS)


def test_every_mixer_is_in_some_architecture():
    used = {name for changes in presets.ARCHITECTURES.values() for name in presets.pattern(changes["mixer"])}
    assert set(presets.get_preset("elastic-exp-98m").mixer) == {"swa", "elastic"}
    assert used == set(MIXERS)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tiny_models_have_equally_many_parameters(every):
    """By default of backbones and caching only those around one rule."""
    target = presets.SIZES["tiny"].parameters
    names = presets.preset_names("tiny")
    if not every:
        rule_of = lambda name: name.removesuffix("-tiny").rpartition("-")[::2]
        around = {*presets.BACKBONES, "residual", "grm", "soup", "ssc"}
        names = [n for n in names if rule_of(n)[1] not in around or rule_of(n)[0] in ("gla", "dla")]
        assert len(names) > 40
    for name in names:
        assert abs(count_parameters(presets.get_preset(name)) / target - 1) < 0.025, name


@pytest.mark.parametrize("size", some_slow(["170m", "340m", "760m", "1.3b"], ["170m", "340m", "760m"]))
def test_parameter_counts_are_near_the_papers_names(size):
    """Every model of the paper at 340M; at the other sizes those whose parts count differently."""
    chosen = PAPER if size == "340m" else ["transformer++", "gated-deltanet-h2", "mamba2", "rwkv7", "atlas++", "dot"]
    for architecture in [*chosen, "rwkv7-mac", *(f"atlas++-{suffix}" for suffix in presets.BACKBONES)]:
        config = presets.get_preset(f"{architecture}-{size}")
        assert abs(count_parameters(config) / presets.SIZES[size].parameters - 1) < 0.02, architecture
        assert config.vocab_size == 32_000
        if config.ffn == "swiglu" and architecture != "rwkv7-mac":
            assert config.num_layers == {"170m": 12, "340m": 24, "760m": 24, "1.3b": 18}[size]
            assert config.mlp_dim % 64 == 0


ELASTIC = {"98m": 97_707_600, "205m": 205_036_920, "345m": 344_714_400}


@pytest.mark.parametrize("sizes", some_slow([("98m",), ("205m", "345m")], [("205m", "345m")]), ids="-".join)
def test_sizes_of_other_papers(sizes):
    """E's 12 layers with heads of 90, the memory in the ninth; G's six layers, counted exactly."""
    for size in sizes:
        count = ELASTIC[size]
        config = presets.get_preset(f"elastic-exp-{size}")
        assert count_parameters(config) == count
        assert (config.num_layers, config.head_dim, config.mixer.index("elastic")) == (12, 90, 8)
        assert (config.elastic.order, config.elastic.block_size, config.elastic.context) == (540, 2048, 32_768)
        memorizing = presets.get_preset(f"memorizing-{size}")  # a gate for each head more
        assert count_parameters(memorizing) == count + config.num_heads
        assert memorizing.mixer.index("memorizing") == 8
        assert memorizing.memorizing == MemorizingConfig(540, 2048)
        infini = presets.get_preset(f"infini-{size}")
        assert count_parameters(infini) == count + 12 * config.num_heads
        assert (infini.pattern, infini.infini.block_size) == (("infini",), 2048)
        melodi = presets.get_preset(f"melodi-{size}")  # 90 summary tokens, their mixing with 2,048 others, three norms
        assert count_parameters(melodi) == count + 12 * (90 * (config.dim + 2048 + 90 + 1) + 3 * config.dim)
        assert (melodi.pattern, melodi.melodi) == (("melodi",), MelodiConfig(90, 2048))
        # Numbers in the memories of a sequence (E Table 1): all models have the same.
        heads = config.num_heads
        assert 540 * (90 + 90) * heads == 12 * 90 * 90 * heads == 12 * melodi.melodi.summary_tokens * 90 * heads
        recurrent = presets.get_preset(f"transformer-block-recurrence-{size}")
        assert count_parameters(recurrent) == count
        assert (recurrent.pattern, recurrent.block_recurrence.block_size) == (("block_recurrence",), 2048)
    counts = {name: count_parameters(presets.get_preset(f"{name}-22m")) for name in presets.PUBLISHED["22m"]}
    assert counts == {
        "gam": 22_599_680, "gam-sum": 19_447_808, "gam-global": 19_435_520, "gam-local": 17_874_944,
        "gam-transformer": 24_166_400, "gam-mamba": 20_504_576,
    }  # fmt: skip


def test_counts_of_atlas_are_exact():
    """The numbers that the documentation prints."""
    assert {size: count_parameters(presets.get_preset(f"atlas-{size}")) for size in presets.SIZES} == {
        "tiny": 1_070_864,
        "170m": 170_649_024,
        "340m": 341_029_248,
        "760m": 761_627_520,
        "1.3b": 1_296_825_616,
    }


@pytest.mark.parametrize("name", some_slow(["ttt-linear-tiny", "transformer++-tiny"], ["ttt-linear-tiny"]))
def test_description_is_what_a_real_model_has(name):
    config = presets.get_preset(name)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.split(model, nnx.Param)[1])
    described = presets.describe(config, length=96)
    assert described["parameters"] == sum(x.size for x in leaves) == count_parameters(config)
    assert described["parameters"] - described["non_embedding_parameters"] == config.vocab_size * config.dim
    assert described["state_bytes_per_sequence"] == sum(x.nbytes for x in jax.tree.leaves(model.init_cache(1, 96)))


def test_a_mixer_with_a_memory_is_that_of_the_preset():
    for suffix, mixer in presets.BACKBONES.items():
        assert presets.model_around(mixer) == presets.get_preset(f"atlas-{suffix}-tiny")


def all_monomials():
    return rules.atlas()


def test_a_part_with_too_many_parameters():
    words = r"'tests.test_presets:all_monomials' has 1,6.* mlp_dim=8; .* about 1,070,000"
    with pytest.raises(ValueError, match=words) as e:
        presets.model_around(all_monomials)
    assert "\n" not in str(e.value)


_COUNTED = [("atlas", "tiny"), ("mamba2", "340m"), ("mamba", "1.3b"), ("gam", "22m"), ("rwkv7", "tiny")]


@pytest.mark.parametrize("names", [_COUNTED, pytest.param(None, marks=pytest.mark.slow)])
def test_the_table_of_sizes_has_what_counting_gives(names):
    """If this fails: python docs/preset_sizes.py"""
    for architecture, size in names or presets.fitted_names():
        assert presets.PRESETS[f"{architecture}-{size}"] == presets.fitted(architecture, size)
    table = {(row, architecture) for row, found in presets._table().items() for architecture in found}
    assert {(size, architecture) for architecture, size in presets.fitted_names()} == {
        (row.partition(" ")[0], architecture) for row, architecture in table
    }


def test_a_wrong_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="Did you mean 'atlas-tiny'"):
        presets.get_preset("atlas-tyni")
    with pytest.raises(ValueError, match="Did you mean 'tiny'"):
        presets.preset_names("tiiny")


def test_listing_them_computes_nothing():
    code = (
        "import jax; from flax import nnx; nnx.eval_shape = None\n"
        "from atlasjax.presets import PRESETS; assert 'atlas-tiny' in PRESETS; print(len(list(PRESETS)))"
    )
    assert int(subprocess.check_output([sys.executable, "-c", code], text=True)) == len(presets.PRESETS)


@pytest.mark.parametrize(
    "name", ["gam-22m", "elastic-exp-98m", "elastic-uniform-345m", "titans-170m", "atlas-1.3b", "titans-tiny"]
)
def test_every_recipe_leaves_its_warm_up(name):
    config = default_config(name)
    assert config.optimizer.warmup_steps <= config.steps / 10


def test_the_recipes_of_elastic_memory_and_gam():
    """E Table 9; G §4.3."""
    elastic = default_config("elastic-exp-98m")
    assert (elastic.optimizer.learning_rate, elastic.optimizer.eps) == (2e-3, 1e-7)
    assert elastic.steps * elastic.data.batch_size * elastic.data.sequence_length == pytest.approx(40e9, rel=1e-4)
    assert elastic.optimizer.warmup_steps == round(0.01 * elastic.steps)
    gam = default_config("gam-22m")
    assert (gam.optimizer.learning_rate, gam.optimizer.warmup_steps, gam.data.batch_size) == (3e-4, 100, 32)
