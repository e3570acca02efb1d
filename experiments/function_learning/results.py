"""Rows of the experiment: their identity, and a JSONL file from which an interrupted run can resume."""

import dataclasses
import pathlib

from experiments.rows import Row, append_rows, read_rows

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
        """Reads the file if it exists (`read_rows`)."""
        return cls(path, read_rows(path))

    def add(self, rows: list[Row]) -> None:
        """Appends rows to the file at once."""
        append_rows(self.path, rows)
        self.rows += rows

    def find(self, row: Row) -> Row | None:
        """The stored row with the identity of `row`."""
        wanted = identity(row)
        return next((r for r in self.rows if identity(r) == wanted), None)
