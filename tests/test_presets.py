"""Presets: names, sizes, and what is known of them without allocating them."""

import jax
import pytest
from flax import nnx

from atlasjax import presets, rules
from atlasjax.nn import LanguageModel, count_parameters


def test_every_rule_has_every_size():
    assert set(presets.PRESETS) == {
        f"{rule.replace('_', '-')}-{size}"
        for rule in rules.REGISTRY
        for size in ("tiny", "170m", "340m", "760m", "1.3b")
    }


@pytest.mark.parametrize("rule", rules.REGISTRY)
def test_parameter_counts_are_near_the_papers_names(rule):
    for size in presets.sizes(rule):
        assert abs(size.difference) < 0.09, size
        config = presets.get_preset(size.preset)
        assert config.memory.rule == rule
        assert config.vocab_size == 32_000


def test_counts_of_atlas_are_exact():
    """The numbers that the documentation prints."""
    assert {size.preset: size.parameters for size in presets.sizes("atlas")} == {
        "atlas-170m": 168_879_552,
        "atlas-340m": 350_466_432,
        "atlas-760m": 775_783_296,
        "atlas-1.3b": 1_303_903_504,
    }


def test_description_is_what_a_real_model_has():
    config = presets.get_preset("ttt-linear-tiny")
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.split(model, nnx.Param)[1])
    described = presets.describe(config)
    assert described["parameters"] == sum(x.size for x in leaves) == count_parameters(config)
    assert described["parameters"] - described["non_embedding_parameters"] == config.vocab_size * config.dim
    assert described["state_bytes_per_sequence"] == sum(x.nbytes for x in jax.tree.leaves(model.init_cache(1)))


def test_a_wrong_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="Did you mean 'atlas-tiny'"):
        presets.get_preset("atlas-tyni")
    with pytest.raises(ValueError, match="Did you mean 'omeganet'"):
        presets.sizes("omega-net")
