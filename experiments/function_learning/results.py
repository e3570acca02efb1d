"""Rows of the experiment: what one is called, and a JSONL file of them that an interrupted run can go on with."""

import dataclasses
import json
import pathlib
from typing import Any

Row = dict[str, Any]

BLOCK = 64  # tokens of one point of a curve, and of the mean that is the reference
LAST = 256  # tokens whose mean loss is the result

# What a row is about; the rest of it is what was measured.
IDENTITY = ("kind", "dim", "length", "rank", "window", "setting", "hidden_layers", "expansion", "optimizer", "seed")


def identity(row: Row) -> tuple:
    """Equal for two rows that measured the same thing. A sweep's rows differ by their rate; a run has one, from the sweep."""
    rate = row["learning_rate"] if row["kind"] == "sweep" else None
    return (*(row.get(name) for name in IDENTITY), rate)


@dataclasses.dataclass
class Store:
    """A JSONL file, one row a line. `rows` holds what is in it."""

    path: pathlib.Path
    rows: list[Row] = dataclasses.field(default_factory=list)

    @classmethod
    def open(cls, path: pathlib.Path) -> "Store":
        """Reads the file if there is one. A last line without its end, which a killed run leaves behind, is cut off and said.

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
