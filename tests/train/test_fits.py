"""Memory is estimated before anything is made: what is needed, and what it takes."""

import dataclasses
import math

import jax
import pytest

from atlasjax.machine import available_bytes
from atlasjax.presets import PRESETS, PUBLISHED_SIZES, get_preset
from atlasjax.train import default_config, fits
from atlasjax.train.state import model_shapes

ONE = {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    "preset", ["atlas-tiny", "atlas-mag-tiny", "samba-tiny", "retnet-tiny", "transformer++-tiny", "gam-22m"]
)
def test_fewer_parameters_than_the_model_has(preset):
    model = get_preset(preset)
    number = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model_shapes(model)[1]))
    assert number / 4 < fits.parameters_at_least(model) <= number


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        (
            1,
            r"Use a smaller model \(its largest sizes are model.vocab_size 32,000, model.mlp_dim 2,176, .*\), or at least 6 such",
        ),
        (5.9, "Use a data.sequence_length of at most"),
        (16, "Use an accumulation of at least 4"),
    ],
)
def test_what_it_takes(gib, words):
    config = default_config("atlas-340m")
    with pytest.raises(ValueError, match=rf"needs at least [\d.]+ GiB .* Only {gib:.1f} GiB is available. {words}"):
        fits.check_fits(config, ONE, 390_000_000, int(gib * 2**30))


def test_logits_count_as_far_as_they_exist_at_once():
    config = default_config("atlas-340m")
    whole = dataclasses.replace(config, loss=dataclasses.replace(config.loss, chunk=None))
    with pytest.raises(ValueError, match="Use an accumulation of at least 8"):
        fits.check_fits(whole, ONE, 390_000_000, 16 * 2**30)


def test_what_fits_is_not_refused():
    config = default_config("atlas-340m")
    fits.check_fits(dataclasses.replace(config, accumulation=128), ONE, 390_000_000, 16 * 2**30)
    fits.check_fits(config, {"data": 1, "fsdp": 16, "tensor": 4}, 390_000_000, 15 * 2**30)
    fits.check_fits(config, ONE, 390_000_000, None)
    fits.check_fits(default_config("atlas-tiny"), ONE, 1_100_000, available_bytes())


def test_every_published_preset_can_be_trained():
    names = [name for name in PRESETS if name.rpartition("-")[2] in PUBLISHED_SIZES]
    assert len(names) == 34
    for name in names:
        config = default_config(name)
        tokens = config.data.sequence_length * config.data.batch_size
        assert tokens == (32 * 256 if name.endswith("-22m") else 2**19), name  # G §4.3; all others half a million
        length = 32_768 if name.endswith(("-98m", "-205m", "-345m")) else 4096  # E Table 9; A App. E
        assert config.data.sequence_length == min(length, config.model.max_positions or length), name
