"""Options of `atlasjax generate`."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

from atlasjax import storage
from atlasjax.cli.parsing import parse
from atlasjax.generate.sampling import SamplingConfig
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.saving.runs import checkpoint_folder


@dataclasses.dataclass(frozen=True)
class GenerateCommand:
    """Options of `atlasjax generate`."""

    run_dir: str = "runs/atlas-tiny"
    """Folder of the run."""
    prompt: str | None = None
    """Text to continue. None: "The ", or the text of --prompt-file and --memory."""
    prompt_file: str | None = None
    """File of text (UTF-8) to continue, in place of --prompt. It is not printed."""
    memory: str | None = None
    """File of --save-memory, whose text comes before all other."""
    save_memory: str | None = None
    """Saves what the model holds after reading the text in this file, and generates nothing."""
    max_tokens: int = 400
    """Number of tokens to generate."""
    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=SamplingConfig)
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings, or at an end token of imported weights."""
    samples: int = 1
    """Number of texts. The prompt is read once."""
    seed: int = 0
    """The same seed gives the same text."""
    step: int | None = None
    """Step of the checkpoint. None: the newest usable one."""
    ema: bool = False
    """Take the moving average of the parameters (optimizer.ema_decay) instead of the parameters."""
    trust: tuple[str, ...] = ()
    """Modules of your own parts that the run's files may name, such as my_parts."""


def read(arguments: Sequence[str]) -> GenerateCommand:
    """Parses and checks the command line. Raises ConfigError, or SystemExit after help."""
    command = parse(GenerateCommand, "generate", "Lets a trained model continue a text.", arguments)
    checked(command)
    checkpoint_folder(command.run_dir)
    return command


def checked(command: GenerateCommand) -> tuple[str, str]:
    """The prompt, and the text of the prompt file, after checking everything that needs no model."""
    for name in ("max_tokens", "samples"):
        if getattr(command, name) < 1:
            raise ConfigError(f"{name} is {getattr(command, name)}; it must be at least 1.")
    if not 0 <= command.seed < 2**32:
        raise ConfigError(f"seed is {command.seed}; it must be in [0, 2^32).")
    if command.prompt is not None and command.prompt_file is not None:
        raise ConfigError(
            f"--prompt and --prompt-file {command.prompt_file} both give the text; leave one out. --save-memory reads a file "
            "once, and --memory with --prompt goes on from it."
        )
    alone = command.prompt_file is None and command.memory is None
    prompt = command.prompt if command.prompt is not None else "The " if alone else ""
    if alone and not prompt:
        raise ConfigError("prompt is empty; it should have at least one character.")
    for name, text in [("prompt", prompt), *(("stop", text) for text in command.stop)]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"{name} is not valid Unicode at character {error.start} ({error.reason}).") from None
    if "" in command.stop:
        raise ConfigError("stop is ''; a stop string should have at least one character.")
    with user_errors():
        if command.memory is not None and not storage.path(command.memory).is_file():
            raise ConfigError(f"memory is {command.memory!r}, which is not a file.")
        if command.save_memory is not None:
            _check_place(storage.path(command.save_memory))
        return prompt, "" if command.prompt_file is None else _text(storage.path(command.prompt_file))


def _check_place(file: storage.AnyPath) -> None:
    if file.is_dir():
        raise ConfigError(f"save_memory is {str(file)!r}, which is a folder; give the name of a file.")
    if isinstance(file, pathlib.Path) and not file.parent.is_dir():
        raise ConfigError(f"save_memory is {str(file)!r}; its folder does not exist.")


def _text(file: storage.AnyPath) -> str:
    if not file.is_file():
        raise ConfigError(f"prompt_file is {str(file)!r}, which is not a file.")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt_file is {str(file)!r}, which is not UTF-8 at byte {error.start}.") from None
    if not text:
        raise ConfigError(f"prompt_file is {str(file)!r}, which is empty.")
    return text
