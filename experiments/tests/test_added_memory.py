"""experiments/added_memory: facts are where the tests say, every arm starts as the imported model, rows resume, signs are right."""

import dataclasses
import json

import numpy as np
import pytest

from atlasjax.nn import SSMConfig
from atlasjax.presets import get_preset
from experiments.added_memory import measure, run, text
from experiments.added_memory.arms import ARMS, IMPORTED
from experiments.added_memory.compare import compared, measures
from experiments.added_memory.measure import Recipe

TEXT = np.frombuffer(("A whale, a white whale. " * 200).encode(), np.uint8)


def test_pages_say_one_value_of_a_name():
    pages = text.pages(TEXT, 20, 64, 4, seed=0)
    assert {len(page) for page in pages} == {64}
    for number, page in enumerate(pages):
        marks = np.flatnonzero(page == text.MARK)
        assert (len(marks) >= 8) == bool(number % 2)
        said = [(page[i + 1], page[i + 2]) for i in marks]
        assert len(set(said)) == len({name for name, _ in said}) <= 4
    again = text.pages(TEXT, 20, 64, 4, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(pages, again, strict=True))


def test_needles_are_where_they_are_said_to_be():
    tokens, asked = text.needles(TEXT, 6, 256, 5, seed=0)
    assert tokens.shape == (6, 256)
    for row, questions in zip(tokens, asked, strict=True):
        for place, distance in questions:
            stated = place - distance
            assert row[place] == row[stated]
            assert list(row[stated - 2 : stated]) == [text.MARK, row[place - 1]]
            assert list(row[place - 2 : place]) == [text.MARK, row[stated - 1]]
    assert asked[..., 0].max() == 255
    assert asked[..., 1].max() > 64


def test_windows_and_wrong_sizes():
    assert text.windows(TEXT, 3, 100).shape == (3, 101)
    with pytest.raises(ValueError, match="text of the tests has 4,800"):
        text.windows(TEXT, 3, 5000)
    with pytest.raises(ValueError, match="length"):
        text.pages(TEXT, 1, 12, 4, seed=0)
    with pytest.raises(ValueError, match="multiple of 64"):
        Recipe(length=100)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_what_the_command_adds(config_of_command, monkeypatch, arm):
    """The options in the table of the README give the model of the arm."""
    model = dataclasses.replace(get_preset("granite-h-tiny"), remat=False)
    base = dataclasses.replace(config_of_command("atlasjax train --preset granite-h-tiny"), model=model)
    monkeypatch.setattr("atlasjax.cli.options.train.run_config", lambda _: base)
    found = config_of_command(f"atlasjax train --init-from a --run-dir b {ARMS[arm].options}")
    assert found.model == ARMS[arm].added(model)


@pytest.fixture
def small(monkeypatch):
    ssm = SSMConfig(state_dim=4, head_dim=4)
    config = dataclasses.replace(get_preset("granite-h-tiny"), dim=8, num_heads=2, mlp_dim=8, ssm=ssm, num_layers=4)
    monkeypatch.setattr(measure, "get_preset", lambda _: config)


@pytest.mark.slow  # compiles three models; tests/interop/test_added.py has what they start as
def test_rows_resume(tmp_path, small, capsys):
    (tmp_path / "book.txt").write_text("The whale, the white whale, a sail. " * 60)
    sizes = "--steps 1 --added-steps 1 --batch-size 1 --length 64 --times 2 --facts 2 --asked 8 --windows 1 --needles 2 --seeds 1"
    options = [*sizes.split(), "--text", str(tmp_path / "book.txt"), "--out", str(tmp_path), "--only"]
    run.main([*options, "nothing"])
    run.main([*options, "nothing", "grm"])
    rows = [json.loads(line) for line in (tmp_path / "book.jsonl").read_text().splitlines()]
    assert [row["arm"] for row in rows] == [IMPORTED, "nothing", "grm"]
    assert [row["start_difference"] for row in rows] == pytest.approx([0, 0, 0], abs=1e-5)  # nats; the loss is 6
    assert rows[2]["parameters"] > rows[1]["parameters"] == rows[0]["parameters"]
    assert sum(rows[0]["asked"].values()) == 16
    assert rows[1]["by_position"] != rows[0]["by_position"]
    assert "| grm | nothing | bits per byte, positions 64 to 128 |" in capsys.readouterr().out
    assert (tmp_path / "book.png").stat().st_size > 10_000


def rows_of(gain):
    """Rows of three seeds: an arm that saves `gain` per doubling from position 128 on and recalls what the control does not."""
    recipe = {"length": 128, "times": 4}
    for seed in range(3):
        for arm, by, right in (("nothing", 0.0, 0.5), ("titans", gain, 0.75)):
            position = {"0": 3.0, "64": 2.0, "128": 2.0 - by, "256": 2.0 - 2 * by}
            yield {"arm": arm, "seed": seed, "recipe": recipe, "by_position": position, "asked": dict.fromkeys(position, 4),
                   "by_distance": dict.fromkeys(position, right)}  # fmt: skip


def test_signs_of_the_comparisons():
    found = {told: comparison for _, _, told, comparison in compared(rows_of(0.1))}
    assert list(found) == list(measures(next(rows_of(0.1))))
    effects = [round(one.effect, 6) for one in found.values()]
    assert effects == pytest.approx([0.0, 0.1 / 3 + 0.2 * 2 / 3, 0.2, 0.1, 0.25, 0.25], abs=1e-6)
