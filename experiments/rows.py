"""Result files: one line of JSON for each finished row, so that a stopped command goes on where it was."""

import dataclasses
import fcntl
import gzip
import hashlib
import json
import operator
import os
import pathlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Row = dict[str, Any]
K = TypeVar("K", bound=Hashable)
OWN_TEXTS = ("embedded", "books")  # names of the rows of texts that need no --text


def read_rows(path: pathlib.Path) -> list[Row]:
    """The rows of a file, in order; [] if it is missing. A last line without its end, left by a killed run, is left out.

    The rows of `NAME.jsonl.gz` come before those of `NAME.jsonl`: finished rows that are kept small. New ones are not written
    there, so a command that was stopped goes on as without it.

    Raises:
      ValueError: another line is not JSON.
    """
    packed = packed_path(path)
    kept = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else ""
    text = kept + (path.read_text() if path.exists() else "")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        print(f"{path}: the last line was cut short; it is removed and measured again.")
    rows = []
    for number, line in enumerate(whole.split("\n")[:-1], 1):  # splitlines would also split within a line, at U+2028
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}.") from None
    return rows


def packed_path(path: pathlib.Path) -> pathlib.Path:
    """Where the finished rows of a file are if they are packed: `gzip -9n NAME.jsonl` makes it."""
    return path.with_name(f"{path.name}.gz")


def append_rows(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Appends rows with one write, in place of a last line without its end. Several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # no other process may write between the look at the end and the new end
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(lines.encode())


def append_row(path: pathlib.Path, row: Row) -> None:
    """Appends one row."""
    append_rows(path, [row])


def add_missing(
    path: pathlib.Path, key_of: Callable[[Row], Any], wanted: Iterable[K], measure: Callable[[K], Row | None]
) -> None:
    """Measures each key of which the file has no row, appends its row and prints it. A key without a row is left out."""
    done = [key_of(row) for row in read_rows(path)]
    for key in wanted:
        if key not in done and (row := measure(key)) is not None:
            append_row(path, row)
            print(row, flush=True)


def rows_of_recipe(path: pathlib.Path, recipe: Any, key: Callable[[Row], K]) -> dict[K, Row]:
    """The newest row of each key, all of one recipe, a dataclass that the rows have as "recipe".

    A field that a row's recipe lacks has its default: it was added after the row was measured.

    Raises:
      ValueError: a row was measured with another recipe, or a line is not JSON.
    """
    rows = read_rows(path)
    defaults = {f.name: f.default for f in dataclasses.fields(recipe) if f.default is not dataclasses.MISSING}
    for row in rows:
        if {**defaults, **row["recipe"]} != dataclasses.asdict(recipe):
            raise ValueError(f"{path} has rows of another recipe, {row['recipe']}. Give another --out.")
    return {key(row): row for row in rows}


by_model = operator.itemgetter("model")  # the key of rows with one for each model


def at_least_one(recipe: Any, what: str, names: Iterable[str]) -> None:
    """Raises ValueError for a field of a recipe below one; None is no number."""
    for name in names:
        value = getattr(recipe, name)
        if value is not None and value < 1:
            raise ValueError(f"{what}: {name} must be at least 1, got {value}.")


def text_name(paths: Sequence[str]) -> str:
    """The name of the rows of texts: the names of their files without the suffix; of an input.txt, the name of its folder.

    Raises:
      ValueError: it is a name of rows of the texts that need no --text.
    """
    files = [pathlib.Path(path) for path in paths]
    name = "+".join(file.resolve().parent.name if file.name == "input.txt" else file.stem for file in files)
    if name in OWN_TEXTS:
        raise ValueError(
            f"--text {' '.join(paths)}: {name!r} names the rows of the text without --text; rename the file."
        )
    return name


def text_identity(paths: Sequence[str]) -> str:
    """Names and hash of texts, for a recipe: rows of other texts must not count as rows of these."""
    files = [pathlib.Path(path) for path in paths]
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
    return f"{text_name(paths)}, sha256 {digest[:16]}"
