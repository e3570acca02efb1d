"""TrainConfig: refusals, JSON, and what may change when a run goes on."""

import dataclasses
import json

import pytest

from atlasjax.config_json import from_dict, to_dict
from atlasjax.data import DataConfig
from atlasjax.distributed import MeshConfig
from atlasjax.nn import ModelConfig
from atlasjax.train import OptimizerConfig, TrainConfig, default_config
from atlasjax.train.config import changes_on_resume, saved_config


@pytest.mark.parametrize("preset", ["atlas-tiny", "titans-340m", "omeganet-1.3b"])
def test_json_round_trip(preset):
    config = dataclasses.replace(default_config(preset), mesh=MeshConfig(2, -1, 2))
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_paths_come_back_as_a_tuple():
    config = TrainConfig(ModelConfig(), DataConfig(source="text", paths=("a", "b")))
    assert from_dict(TrainConfig, to_dict(config)).data.paths == ("a", "b")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("steps", 0, "steps is 0"),
        ("keep", 1, "keep is 1"),
        ("accumulation", 3, "accumulation is 3; it should divide data.batch_size, which is 8"),
        ("eval_batches", 0, "eval_batches is 0"),
        ("run_dir", "", "run_dir"),
    ],
)
def test_refused(field, value, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(ModelConfig(), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0),
        ("b2", 1.0),
        ("weight_decay", -1),
        ("clip_norm", 0),
        ("final_fraction", 2),
        ("warmup_steps", -1),
    ],
)
def test_optimizer_refused(field, value):
    with pytest.raises(ValueError, match=f"optimizer.{field} is {value}"):
        OptimizerConfig(**{field: value})


def test_unknown_field_is_corrected():
    values = to_dict(TrainConfig(ModelConfig()))
    values["optimizer"]["lerning_rate"] = 1.0
    with pytest.raises(ValueError, match="Did you mean 'learning_rate'"):
        from_dict(TrainConfig, values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.pop("model"), "TrainConfig: model must be given"),
        (lambda values: values.clear(), "TrainConfig: model must be given"),
        (lambda values: values["optimizer"].update(eps=10**400), "OptimizerConfig.eps: must be float, got 1000"),
    ],
)
def test_fields_that_are_missing_or_too_large(change, words):
    values = to_dict(TrainConfig(ModelConfig()))
    change(values)
    with pytest.raises(ValueError, match=words):
        from_dict(TrainConfig, values)


def test_changes_are_sorted_by_what_they_mean():
    old = TrainConfig(ModelConfig())
    new = dataclasses.replace(
        old, model=ModelConfig(dim=256), steps=7, seed=3, optimizer=OptimizerConfig(learning_rate=1.0),
        data=DataConfig(batch_size=16),
    )  # fmt: skip
    architecture, fixed, free = changes_on_resume(to_dict(old), to_dict(new))
    assert architecture == ["model.dim: 128 → 256"]
    assert sorted(fixed) == ["data.batch_size: 8 → 16", "seed: 0 → 3"]
    assert sorted(free) == ["optimizer.learning_rate: 0.0004 → 1.0", "steps: 1000 → 7"]


def test_presets_of_a_size_have_the_papers_batch():
    config = default_config("atlas-340m")
    assert config.data.batch_size * config.data.sequence_length == 2**19
    assert config.steps * 2**19 == pytest.approx(15e9, rel=1e-4)
    assert config.optimizer.weight_decay == 0.1


def test_what_the_advice_for_a_diverged_run_names_may_change():
    old = TrainConfig(ModelConfig())
    optimizer = OptimizerConfig(learning_rate=1e-5, warmup_steps=5, clip_norm=0.1)
    new = dataclasses.replace(old, model=ModelConfig(dtype="float32"), optimizer=optimizer)
    architecture, fixed, free = changes_on_resume(to_dict(old), to_dict(new))
    assert (architecture, fixed) == ([], [])
    assert len(free) == 4


@pytest.mark.parametrize("mixer", ["memorizing", "infini", "melodi", "block_attention", "block_recurrence"])
def test_a_run_from_before_a_mixer_had_its_own_sizes_is_refused(mixer):
    """Its sizes stood in `elastic`; the defaults would be another model. Other models are loaded."""
    saved = to_dict(TrainConfig(ModelConfig(mixer=("swa", mixer), num_layers=2)))
    assert saved_config(saved).model.pattern == ("swa", mixer)
    del saved["model"][mixer]
    with pytest.raises(
        ValueError, match=f"no model.{mixer}, .* saved by an older atlasjax, which had them in model.elastic"
    ):
        saved_config(saved)
    saved["model"]["mixer"] = "swa"
    assert saved_config(saved).model.mixer == "swa"
