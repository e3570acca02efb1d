"""Result files: one line of JSON for each finished row."""

import json
import pathlib
from typing import Any


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file, in order; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_row(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Adds one row; it is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
