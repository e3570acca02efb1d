"""Rows of the experiment: their identity, and a JSONL file from which an interrupted run can resume."""

import dataclasses
import json
import pathlib
from typing import Any

Row = dict[str, Any]

BLOCK = 64  # tokens per point of a curve, and in the reference mean
LAST = 256  # tokens whose mean loss is the result

# Fields that identify a row; its other fields are measurements.
IDENTITY = ("kind", "dim", "length", "rank", "window", "setting", "hidden_layers", "expansion", "optimizer", "seed")


def identity(row: Row) -> tuple:
    """Equal for two rows that measure the same thing. Rows of a sweep differ in their rate; a run uses the rate from the sweep."""
    rate = row["learning_rate"] if row["kind"] == "sweep" else None
    return (*(row.get(name) for name in IDENTITY), rate)


@dataclasses.dataclass
class Store:
    """A JSONL file with one row per line. `rows` holds its content."""

    path: pathlib.Path
    rows: list[Row] = dataclasses.field(default_factory=list)

    @classmethod
    def open(cls, path: pathlib.Path) -> "Store":
        """Reads the file if it exists. A last line without its end, left by a killed run, is removed with a message.

        Raises:
          ValueError: another line is not a JSON object.
        """
        store = cls(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return store
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                store.rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
        if whole != text:
            print(f"{path}: the last line was cut short; it is removed and measured again.")
            path.write_text(whole)
        return store

    def add(self, rows: list[Row]) -> None:
        """Appends rows to the file at once."""
        with self.path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        self.rows += rows

    def find(self, row: Row) -> Row | None:
        """The stored row with the identity of `row`."""
        wanted = identity(row)
        return next((r for r in self.rows if identity(r) == wanted), None)
