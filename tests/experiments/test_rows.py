"""Files of rows: what a killed run leaves, rows of another recipe, and the newest row of a key."""

import dataclasses

import pytest

from experiments.rows import append_row, append_rows, by_model, read_rows, rows_of_recipe


@dataclasses.dataclass(frozen=True)
class Recipe:
    steps: int = 3


def test_a_line_that_was_cut_short_is_left_out_and_replaced(tmp_path, capsys):
    path = tmp_path / "results" / "rows.jsonl"
    assert read_rows(path) == []
    append_rows(path, [{"a": 1}, {"a": 2}])
    with path.open("a") as file:
        file.write('{"a": 3')
    assert read_rows(path) == [{"a": 1}, {"a": 2}]
    assert "cut short" in capsys.readouterr().out
    append_row(path, {"a": 4})
    assert read_rows(path) == [{"a": 1}, {"a": 2}, {"a": 4}]
    assert not capsys.readouterr().out
    path.write_text("{}\nno JSON\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2 is not JSON"):
        read_rows(path)


def test_rows_of_a_recipe(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"model": name, "value": value, "recipe": {"steps": 3}} for name, value in (("a", 1), ("b", 2), ("a", 3))]
    append_rows(path, rows)
    found = rows_of_recipe(path, Recipe(), by_model)
    assert {name: row["value"] for name, row in found.items()} == {"a": 3, "b": 2}
    with pytest.raises(ValueError, match=r"rows of another recipe, \{.steps.: 3\}"):
        rows_of_recipe(path, Recipe(4), by_model)
