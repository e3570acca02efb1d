"""Bad command lines: every option of `atlasjax train` with values that it may not have, and misplaced or missing arguments.

The run is prepared as it always is, and no step is taken: a command line that is accepted ends there.
"""

import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import random
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

from atlasjax import cli
from atlasjax.cli import train as command
from atlasjax.train import default_config, resume
from atlasjax.train import setup as setup_lib
from atlasjax.train.errors import user_errors
from experiments.faults.run import Case

VALUES = (
    "",
    "x",
    "-1",
    "0",
    "1.5",
    "inf",
    "nan",
    str(2**32),
    str(10**9),
    str(10**18),
    "a\udcffb",
    "None",
    "[]",
    "1e-400",
)
NEVER = ("inf", "nan")  # no option may take these, but those of _MAY_BE
_MAY_BE = ("memory-norm-limit",)  # an infinite limit: never
_TEXT = ("separator", "run-dir", "paths", "suffixes", "column", "tfds")  # any text may be one
OTHERS: tuple[tuple[str, ...], ...] = (
    ("",), ("trian",), ("train", "3"), ("train", "--"), ("train", "--steps"), ("train", "-x"), ("train", "--steps", "1", "2"),
    ("train", "--preset", ""), ("train", "--preset", "atlas"), ("train", "--data.source", "text"),
    ("train", "--data.source", "text", "--data.paths", "/dev/zero"), ("train", "--data.source", "text", "--data.paths", "*.none"),
    ("train", "--data.source", "parquet", "--data.paths", "text.txt"), ("train", "--data.source", "os:path"),
    ("train", "--data.tokenizer", "bpe:255"), ("train", "--data.tokenizer", f"bpe:{10**12}"),
    ("train", "--data.tokenizer", "bpe:x"),
    ("train", "--data.tokenizer", "bpe:text.txt"), ("train", "--data.tokenizer", "sentencepiece:text.txt"),
    ("train", "--processes.coordinator", "x"), ("train", "--processes.num-processes", "2"), ("train", "--run-dir", "text.txt"),
    ("train", "--optimizer.name", "os:getcwd"), ("train", "--optimizer.name", "none:none"), ("train", "--model.mixer", "x:y"),
    ("train", "--mesh.data", "3", "--mesh.fsdp", "-1"), ("evaluate", "--run-dir", "."), ("evaluate", "--max-batches", "-2"),
    ("evaluate", "--piece", "0"), ("evaluate", "--step", "x"), ("generate", "--run-dir", "none"), ("generate", "--prompt", ""),
    ("generate", "--prompt", "\udcff"), ("generate", "--seed", "-1"), ("generate", "--temperature", "nan"),
    ("generate", "--top-p", "2"), ("generate", "--max-tokens", "0"), ("generate", "--min-p", "0"),
    ("generate", "--repetition-penalty", "inf"), ("generate", "--samples", "0"), ("generate", "--stop", ""),
    ("generate", "--prompt-file", "none"), ("generate", "--memory", "none"), ("generate", "--memory", "text.txt"),
    ("generate", "--save-memory", "."), ("generate", "--save-memory", "none/a"), ("info", "--preset"), ("info", "--size", "1"),
    ("info", "--batch-size", "0"), ("info", "--plan", "v9:1"), ("info", "--plan", ""), ("info", "--mesh.data", "2"),
    ("info", "--sequence-length", "-4"), ("info", "--implementation", "x"),
)  # fmt: skip


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Each option with five values, and the other command lines."""
    rng = random.Random(seed)
    every = [list(line) for line in OTHERS]
    for option in _options(default_config("linear-attention-tiny")):
        every += [["train", f"--{option}={value}"] for value in rng.sample(VALUES, 5)]
    if most is not None:
        every = rng.sample(every, most)
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        pathlib.Path("text.txt").write_text("the memory learns while it reads. " * 200)
        for line in every:
            yield " ".join(line).encode("ascii", "backslashreplace").decode(), functools.partial(_asked, line)


def _options(config: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            yield from _options(value, f"{name}.")
        elif not isinstance(value, bool):
            yield name


def _asked(line: list[str]) -> str:
    if line[0] == "train" and not any(word.startswith(("--data.source", "--preset")) for word in line):
        line = [*line, "--preset", "linear-attention-tiny", "--data.source", "text", "--data.paths", "text.txt"]
    before = set(os.listdir())
    printed = io.StringIO()
    with (
        mock.patch.object(command, "train", _prepared), mock.patch.object(command, "_report"),
        contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()),
    ):  # fmt: skip
        code = cli.main(line)
    if set(os.listdir()) != before:
        return "wrong"  # nothing may be left of what was not begun
    if code == 0:
        given = next((word for word in line if "=" in word), "=")
        name, _, value = given.partition("=")
        return (
            "wrong" if value in NEVER and not name.endswith(_MAY_BE) and not any(t in name for t in _TEXT) else "right"
        )
    lines = printed.getvalue().splitlines()
    if code in (cli.USER_ERROR, cli.RUN_ERROR) and len(lines) == 1:
        return "refused"
    raise AssertionError(f"exit code {code}, {len(lines)} lines: {printed.getvalue()[-500:]!r}")


def _prepared(config: Any, **_: Any) -> None:
    with user_errors():
        resume.check_resumable(config)
        setup_lib.prepare(config)
