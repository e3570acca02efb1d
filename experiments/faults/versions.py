"""Another version of the code: a run, a memory file or a prepared folder of an older commit, or with the fields of another version.

Fields that are new here are missing there, fields that are gone here are there, and a newer version has some that are unknown. What
is read gives the parameters that were saved, or is refused in one line that names the field or the version.
"""

import contextlib
import io
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from atlasjax.config_json import to_dict
from atlasjax.generate import Context, load_context, read, save_context
from atlasjax.train import load_run, train
from experiments.faults import damage, signed, small
from experiments.faults.run import Case, Slow, case, some

_BACK = (50, 200, 400)  # commits before this one
_ROOT = pathlib.Path(__file__).parents[2]
_WRITE = """
import pathlib, sys
import jax, numpy
from flax import nnx
from experiments.faults import small
from atlasjax.train import load_run, train
from atlasjax.generate import read, save_context
place = pathlib.Path(sys.argv[1])
train(small.config(place, place / "old", 4))
model = load_run(place / "old").model
context = read(model, [[1, 2, 3]])
save_context(model, context, place / "old.memory")
for name, tree in {"params": nnx.state(model, nnx.Param), "memory": context.cache}.items():
    numpy.savez(place / f"{name}.npz", *map(numpy.asarray, jax.tree.leaves(tree)))
"""


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Each field of a config removed, added to, and renamed, in a run and in a memory file; and runs of older commits."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        config = small.trained(folder, folder / "run", 2)
        model = load_run(folder / "run").model
        expected = small.params(model)
        context = read(model, [[1, 2, 3]])
        save_context(model, context, folder / "whole.memory")
        every: list[Case] = []
        for path in _fields(to_dict(config)):
            for kind, change in _changes(path).items():
                name = f"{kind} {'.'.join(path)}"
                every.append(case(f"run, {name}", _run, folder, expected, path, change))
                if path[0] == "model":
                    every.append(case(f"memory, {name}", _memory, folder, model, context, path, change))
        every = list(some(every, most, rng))
        for back in _BACK:
            if most is None and _commit(back) is not None:
                every += _of_commit(folder, back)
        yield from every


def _fields(value: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, inside in value.items():
        yield (*before, name)
        if isinstance(inside, dict):
            yield from _fields(inside, (*before, name))


def _changes(path: tuple[str, ...]) -> dict[str, signed.Change]:
    *rest, last = path
    renamed = signed.with_field((*rest, f"{last}_of_old"), 1)
    return {
        "without": signed.without_field(path),
        "beside": signed.with_field((*rest, f"new_{last}"), 3),
        "renamed": lambda whole: renamed(signed.without_field(path)(whole)),
    }


def _run(folder: pathlib.Path, expected: object, path: tuple[str, ...], change: signed.Change) -> str:
    """A missing field has its default: the same model, or the checkpoint's arrays do not fit."""
    copy = damage.copied(folder / "run", folder / "copy")
    signed.change_config(copy, change)
    same = lambda loaded: small.same(small.params(loaded.model), expected)
    return small.refused(lambda: load_run(copy), (path[-1], "version", "checkpoint", "shape"), right=same)


def _memory(folder: pathlib.Path, model: Any, context: Context, path: tuple[str, ...], change: signed.Change) -> str:
    file = folder / "copy.memory"
    file.write_bytes((folder / "whole.memory").read_bytes())
    signed.change_about(file, change)
    same = lambda found: small.same(found.cache, context.cache)
    return small.refused(lambda: load_context(model, file), (path[-1], path[0]), right=same)


def _commit(back: int) -> str | None:
    """The commit so many before this one; None without a history that has it."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"HEAD~{back}"]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False).stdout.strip() or None


def _of_commit(folder: pathlib.Path, back: int) -> list[Case]:
    made: list[pathlib.Path] = []

    def written() -> pathlib.Path:
        """The folder in which the code of that commit wrote a run and a memory."""
        if not made:
            source, place = folder / f"code-{back}", folder / f"of-{back}"
            source.mkdir()
            place.mkdir()
            archive = subprocess.run(["git", "archive", str(_commit(back))], cwd=_ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", str(source)], input=archive.stdout, check=True)
            command, there = [sys.executable, "-c", _WRITE, str(place)], {**os.environ, "PYTHONPATH": str(source)}
            subprocess.run(command, cwd=source, env=there, check=True, capture_output=True, text=True)
            made.append(place)
        return made[0]

    def saved(name: str, tree: Callable[[Any], Any]) -> Callable[[Any], bool]:
        """Whether what is loaded has the arrays that were saved, bit for bit."""
        with np.load(written() / f"{name}.npz") as file:
            arrays = [file[f"arr_{n}"] for n in range(len(file.files))]
        return lambda loaded: small.same(jax.tree.leaves(tree(loaded)), arrays)

    def read_here() -> str:
        return small.refused(
            lambda: load_run(written() / "old"),
            ("version", "config", "field"),
            right=saved("params", lambda run: nnx.state(run.model, nnx.Param)),
        )

    def gone_on() -> str:
        place = written()
        config = small.config(place, place / "old", 6)
        with contextlib.redirect_stdout(io.StringIO()):
            words = ("version", "config", "model", "data")
            return small.refused(lambda: train(config), words, right=lambda result: result.resumed_from == 4)

    def memory() -> str:
        place = written()
        words, same = ("version", "model", "parameters", "format"), saved("memory", lambda context: context.cache)
        return small.refused(
            lambda: load_context(load_run(place / "old").model, place / "old.memory"), words, right=same
        )

    return [
        (f"a run of {back} commits before, read", Slow(read_here)),
        (f"a run of {back} commits before, gone on", Slow(gone_on)),
        (f"a memory of {back} commits before", Slow(memory)),
    ]
