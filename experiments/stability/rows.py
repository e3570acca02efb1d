"""Result files with one line of JSON per finished row."""

import json
import pathlib
from typing import Any


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file, in order. Empty if the file is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_row(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Appends one row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
