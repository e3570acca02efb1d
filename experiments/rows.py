"""Result files: one line of JSON for each finished row, so that a stopped command goes on where it was."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

Row = dict[str, Any]
K = TypeVar("K", bound=Hashable)


def read_rows(path: pathlib.Path) -> list[Row]:
    """The rows of a file, in order; [] if it is missing. A last line without its end, left by a killed run, is left out.

    Raises:
      ValueError: another line is not JSON.
    """
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        print(f"{path}: the last line was cut short; it is removed and measured again.")
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
    return rows


def append_rows(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Appends rows with one write, in place of a last line without its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("ab+") as file:
        file.seek(0)
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
        file.write(lines.encode())


def append_row(path: pathlib.Path, row: Row) -> None:
    """Appends one row."""
    append_rows(path, [row])


def rows_of_recipe(path: pathlib.Path, recipe: Any, key: Callable[[Row], K]) -> dict[K, Row]:
    """The newest row of each key, all of one recipe, a dataclass that the rows have as "recipe".

    Raises:
      ValueError: a row was measured with another recipe, or a line is not JSON.
    """
    rows = read_rows(path)
    for row in rows:
        if row["recipe"] != dataclasses.asdict(recipe):
            raise ValueError(f"{path} has rows of another recipe, {row['recipe']}. Give another --out.")
    return {key(row): row for row in rows}


def by_model(row: Row) -> str:
    """The key of rows with one for each model."""
    return row["model"]
