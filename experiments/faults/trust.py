"""Names in files: "package.module:object" in the config of a run, a checkpoint or a memory file, whose digests are right.

The module is one of ours that leaves a mark when it is imported. It may not be imported because a file says so, and the refusal
says in one line which name asks for it.
"""

import contextlib
import functools
import itertools
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

from atlasjax.generate import load_context, read, save_context
from atlasjax.train import load_run
from experiments.faults import damage, signed, small
from experiments.faults.run import Case, case, some

_MODULE = "faults_stranger"
_NAMES = tuple(f"{_MODULE}:{name}" for name in ("make", "Thing", "missing", "a.b"))
_FIELDS = (
    ("model", "memory", "rule"), ("model", "mixer"), ("model", "memory", "implementation"), ("optimizer", "name"),
    ("optimizer", "schedule"), ("data", "source"), ("model", "branch", "mixer"),
)  # fmt: skip
_COMMANDS = {
    "generate": ("generate", "--run-dir", "copy", "--max-tokens", "2", "--prompt", "a"),
    "evaluate": ("evaluate", "--run-dir", "copy", "--max-batches", "1"),
    "serve": ("serve", "--run-dir", "copy", "--port", "0"),
    "export": ("export", "exported", "--run-dir", "copy"),
    "train": ("train", "--run-dir", "copy", "--steps", "2"),
    "train --init-from": ("train", "--run-dir", "new", "--init-from", "copy", "--steps", "2"),
}


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Every field that may hold a name, with names of objects that are there and that are not, read by every command."""
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch.object(sys, "path", [place, *sys.path]),
        contextlib.chdir(place),
    ):
        folder = pathlib.Path(place)
        (folder / f"{_MODULE}.py").write_text(
            "import pathlib\npathlib.Path(__file__).with_name('mark').touch()\n"
            "def make(*_, **__):\n    raise RuntimeError('called')\n\n\nclass Thing:\n    pass\n"
        )
        small.trained(folder, folder / "run", 2)
        model = load_run(folder / "run").model
        save_context(model, read(model, [[1, 2, 3]]), folder / "whole.memory")
        every: list[Case] = []
        for field, name in itertools.product(_FIELDS, _NAMES):
            said = f"{'.'.join(field)} = {name}"
            every += [
                case(f"{command}: {said}", _read_by, folder, field, name, line) for command, line in _COMMANDS.items()
            ]
            if field[0] == "model":
                every.append(case(f"load_context: {said}", _memory, folder, model, field, name))
        yield from some(every, most, random.Random(seed))


def _read_by(folder: pathlib.Path, field: tuple[str, ...], name: str, line: tuple[str, ...]) -> str:
    copy = damage.copied(folder / "run", folder / "copy")
    for made in ("new", "exported"):
        damage.gone(folder / made)
    signed.change_config(copy, signed.with_field(field, name))
    patches = small.not_served() if line[0] == "serve" else []
    return _unmarked(folder, functools.partial(small.asked, line, (_MODULE,), patches))


def _memory(folder: pathlib.Path, model: object, field: tuple[str, ...], name: str) -> str:
    file = folder / "copy.memory"
    file.write_bytes((folder / "whole.memory").read_bytes())
    signed.change_about(file, signed.with_field(field, name))
    return _unmarked(folder, lambda: small.refused(lambda: load_context(model, file), (".".join(field[:2]), _MODULE)))


def _unmarked(folder: pathlib.Path, case: Callable[[], str]) -> str:
    """The outcome of a case; wrong if the stranger's module was imported."""
    try:
        how = case()
    finally:
        marked = (folder / "mark").exists()
        (folder / "mark").unlink(missing_ok=True)
        sys.modules.pop(_MODULE, None)
    return "wrong" if marked else how
