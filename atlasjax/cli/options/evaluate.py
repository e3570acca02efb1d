"""Options of `atlasjax evaluate`."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated

import tyro

from atlasjax.check import is_finite
from atlasjax.cli.parsing import parse
from atlasjax.data.files import check_there
from atlasjax.data.text import Errors
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.saving.runs import checkpoint_folder

_MOST_SAMPLES = 100_000  # all prompts are made before the first is read
_UNITS = {"": 1, "k": 1024, "m": 1024**2}


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Options of `atlasjax evaluate --tasks`."""

    tasks: tuple[str, ...] = ()
    """Long-context tasks; tasks, groups or tags of lm-eval, or YAML files of tasks. Results go to the run's folder."""
    include_path: tuple[str, ...] = ()
    """Folders with YAML files of your own tasks."""
    limit: float | None = None
    """Documents of each task: a number, or a share below 1. None: all."""
    num_fewshot: int | None = None
    """Examples in the context. None: as the task says."""
    batch_size: int = 8
    """Rows read together."""
    window: int | None = None
    """Tokens of a window of rolling perplexity. None: the training length; with --stream, the whole document."""
    prefix_token: int | None = None
    """Token before documents and empty contexts. None: the one of imported weights for the beginning of texts; else a line end."""
    apply_chat_template: bool = False
    """Asks in the form of a conversation, by the chat template that was imported with the weights."""
    log_samples: bool = False
    """Saves every document with what the model answered."""

    def check(self) -> None:
        """Raises ConfigError for a number out of range."""
        for name in ("batch_size", "window", "num_fewshot"):
            value, least = getattr(self, name), 0 if name == "num_fewshot" else 1
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}.")
        limit = self.limit
        if limit is not None and not (0 < limit < 1 or (is_finite(limit) and limit >= 1 and limit == int(limit))):
            raise ConfigError(f"limit is {self.limit}; it must be a whole number of documents, or a share below 1.")


@dataclasses.dataclass(frozen=True)
class LongContextOptions:
    """Options of long-context tasks."""

    lengths: tuple[str, ...] = ("1k", "2k", "4k", "8k")
    """Tokens of prompt and answer together: numbers, with k for 1,024 and m for 1,048,576."""
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    """Where in the prompt the answer is, in percent: 0 is its beginning, 100 its end."""
    samples: int = 10
    """Prompts for each length and depth, or windows of text for each length."""
    seed: int = 0
    """Seed of the first prompt. The next ones have the numbers after it."""

    def numbers(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The lengths in tokens and the depths in [0, 1], each once. Raises ConfigError for a number out of range."""
        for name, least, most in (("samples", 1, _MOST_SAMPLES), ("seed", 0, 2**32 - 1)):
            if not least <= getattr(self, name) <= most:
                what = f"at least {least}" if getattr(self, name) < least else f"at most {most:,}"
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {what}.")
        for name in ("lengths", "depths"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} needs at least one number.")
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ConfigError(f"depths has {depth:g}; it must be in [0, 100].")
        depths = dict.fromkeys(depth / 100 for depth in self.depths)
        return tuple(dict.fromkeys(map(_length, self.lengths))), tuple(depths)


def _length(text: str) -> int:
    match = re.fullmatch(r"0*([1-9][0-9]{0,15})([km]?)", text.lower())
    if match is None:
        raise ConfigError(f"lengths has {text!r}; it must be a number of tokens such as 4096 or 4k.")
    return int(match[1]) * _UNITS[match[2]]


@dataclasses.dataclass(frozen=True)
class EvaluateCommand:
    """Options of `atlasjax evaluate`."""

    run_dir: str = "runs/atlas-tiny"
    """Folder of the run."""
    step: int | None = None
    """Step of the checkpoint. None: the newest usable one."""
    ema: bool = False
    """Take the moving average of the parameters (optimizer.ema_decay) instead of the parameters."""
    trust: tuple[str, ...] = ()
    """Modules of your own parts that the run's files may name, such as my_parts."""
    text: tuple[str, ...] = ()
    """Text files or folders to evaluate on. None given: the run's own held-out text and its evaluation sets."""
    encoding: Annotated[str | None, tyro.conf.arg(name="data.encoding")] = None
    """Encoding of --text, such as latin-1. None: the run's."""
    errors: Annotated[Errors | None, tyro.conf.arg(name="data.errors")] = None
    """How to treat bytes of --text that are invalid in it: strict is an error. None: as the run."""
    max_batches: int | None = None
    """Maximum number of batches. None: the whole text."""
    stream: bool = False
    """Read the text as one long stream through the constant-size cache instead of in sequences of the training length."""
    piece: int = 512
    """Tokens read at a time with --stream."""
    harness: Annotated[TaskOptions, tyro.conf.arg(name="")] = dataclasses.field(default_factory=TaskOptions)
    long_context: Annotated[LongContextOptions, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=LongContextOptions
    )


def read(arguments: Sequence[str]) -> EvaluateCommand:
    """Parses and checks the command line. Raises ConfigError, or SystemExit after help."""
    command = parse(
        EvaluateCommand,
        "evaluate",
        "Measures a trained model on held-out text, on long-context tasks, or on tasks of lm-eval.",
        arguments,
    )
    for name in ("max_batches", "piece"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    named = {argument.partition("=")[0] for argument in arguments}  # an option may be given without a value
    if "--text" in named and not command.text:
        raise ConfigError("--text is empty; it needs at least one file or folder.")
    for name in ("encoding", "errors"):
        if getattr(command, name) is not None and not command.text:
            raise ConfigError(f"--data.{name} is for --text, which is not given.")
    if command.harness.tasks:
        command.harness.check()
        return command
    if "--tasks" in named:
        raise ConfigError("--tasks is empty; it needs the name of at least one task.")
    for given in (command.harness, command.long_context):
        for field in dataclasses.fields(given):
            if getattr(given, field.name) != getattr(type(given), field.name):
                raise ConfigError(f"--{field.name.replace('_', '-')} is for --tasks, which is not given.")
    if command.piece != EvaluateCommand.piece and not command.stream:
        raise ConfigError("--piece is for --stream, which is not given.")
    checkpoint_folder(command.run_dir)
    with user_errors():
        check_there(command.text)
    return command
