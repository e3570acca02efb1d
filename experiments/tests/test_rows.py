"""Files of rows: what a killed run leaves, two writers at once, rows of another recipe or text, and the newest row of a key."""

import dataclasses
import threading

import pytest

from experiments.rows import append_row, append_rows, by_model, read_rows, rows_of_recipe, text_identity, text_name


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


def test_two_writers_at_once_lose_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    write = lambda who: [append_row(path, {"who": who, "number": i, "padding": "x" * 9000}) for i in range(100)]
    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_rows(path)) == 400


def test_a_line_may_contain_other_separators(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x\u2028y"}\n', encoding="utf-8")
    assert read_rows(path) == [{"a": "x\u2028y"}]


def test_a_field_that_older_rows_lack_has_its_default(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Longer(Recipe):
        text: str | None = None

    path = tmp_path / "rows.jsonl"
    append_row(path, {"model": "a", "recipe": {"steps": 3}})
    assert list(rows_of_recipe(path, Longer(), by_model)) == ["a"]
    with pytest.raises(ValueError, match="rows of another recipe"):
        rows_of_recipe(path, Longer(text="book, sha256 0"), by_model)


def test_texts_have_names_and_hashes(tmp_path):
    one, other = tmp_path / "one" / "input.txt", tmp_path / "other" / "book.txt"
    for path in (one, other):
        path.parent.mkdir()
        path.write_text(path.stem)
    assert text_name([str(one)]) == "one"
    assert text_name([str(one), str(other)]) == "one+book"
    before = text_identity([str(other)])
    assert before.startswith("book, sha256 ")
    other.write_text("another text")
    assert text_identity([str(other)]) != before
    with pytest.raises(ValueError, match="'embedded' names the rows of the text without --text"):
        text_name(["embedded.txt"])
