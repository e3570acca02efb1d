"""The ways in which a file can be damaged."""

import json
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

Damage = Callable[[pathlib.Path, random.Random], None]


def truncated(path: pathlib.Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(max(1, len(content)))])


def flipped(path: pathlib.Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zeroed(path: pathlib.Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(max(1, len(content)))
    end = min(len(content), start + 1 + rng.randrange(64))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def garbled(path: pathlib.Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(max(1, path.stat().st_size)))


def grown(path: pathlib.Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(9))


def emptied(path: pathlib.Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def removed(path: pathlib.Path, rng: random.Random) -> None:
    path.unlink()


def a_folder(path: pathlib.Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def a_link_to_nothing(path: pathlib.Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nothing")


FILE: list[Damage] = [truncated, flipped, zeroed, garbled, grown, emptied, removed, a_folder, a_link_to_nothing]


def other_json(path: pathlib.Path, rng: random.Random) -> None:
    """Another JSON value: of another type, or with one place changed."""
    value = json.loads(path.read_bytes())
    others: list[Any] = [
        None,
        [],
        {},
        "x",
        3,
        True,
        [value],
        {"value": value},
        *(_changed(value, rng) for _ in range(2)),
    ]
    path.write_text(json.dumps(rng.choice([other for other in others if other != value])))


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value:
        name = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {key: inner for key, inner in value.items() if key != name}
        return {**value, name: _changed(value[name], rng)}
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        return [*value[:place], _changed(value[place], rng), *value[place + 1 :]]
    return value + 1 if isinstance(value, int | float) else rng.choice([None, 0, [], "y"])


def gone(path: pathlib.Path) -> None:
    """Removes what is there, if anything: a file, a link or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def a_text(path: pathlib.Path) -> None:
    """A text file in place of what is there."""
    gone(path)
    path.write_text("x")


def on(path: pathlib.Path | str, kind: Damage, rng: random.Random) -> Callable[[pathlib.Path], None]:
    """Damage to the file at a path of a folder, with random numbers of its own."""
    own = random.Random(rng.random())
    return lambda folder: kind(folder / path, own)


def copied(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """A fresh copy of a folder, in place of what is there."""
    shutil.rmtree(target, ignore_errors=True)
    return pathlib.Path(shutil.copytree(source, target))
