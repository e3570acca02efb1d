"""Bad command lines: every option of `atlasjax train` with values that it may not have, and misplaced or missing arguments.

The run is prepared as it always is, and no step is taken: a command line that is accepted ends there.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import tempfile
from collections.abc import Iterator
from typing import Any

from atlasjax.train import default_config
from experiments.faults import small
from experiments.faults.run import Case, case, some

VALUES = (
    "", "x", "-1", "0", "1.5", "inf", "nan", str(2**32), str(10**9), str(10**18), "a\udcffb", "None", "[]", "1e-400",
)  # fmt: skip
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
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        pathlib.Path("text.txt").write_text("the memory learns while it reads. " * 200)
        for line in some(every, most, rng):
            yield case(" ".join(line).encode("ascii", "backslashreplace").decode(), _asked, line)


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
    name, _, value = next((word for word in line if "=" in word), "=").partition("=")
    may = value not in NEVER or name.endswith(_MAY_BE) or any(text in name for text in _TEXT)
    before = set(os.listdir())
    how = small.asked(line, ("",), small.not_trained(), right=lambda _: may)
    return how if set(os.listdir()) == before else "wrong"  # nothing may be left of what was not begun
