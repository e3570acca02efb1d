"""`atlasjax generate`."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import tyro

from atlasjax.cli.parsing import parse
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.generate import SamplingConfig, stream
from atlasjax.train.errors import ConfigError
from atlasjax.train.load import load_run


@dataclasses.dataclass(frozen=True)
class GenerateCommand:
    """Options of `atlasjax generate`."""

    run_dir: str = "runs/atlas-tiny"
    """Folder of the run."""
    prompt: str = "The "
    """Text to continue."""
    max_tokens: int = 400
    """Number of tokens to generate."""
    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=SamplingConfig)
    seed: int = 0
    """The same seed gives the same text."""
    step: int | None = None
    """Step of the checkpoint. None: the newest usable one."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    command = parse(GenerateCommand, "generate", "Lets a trained model continue a text.", arguments)
    if command.max_tokens < 1:
        raise ConfigError(f"max_tokens is {command.max_tokens}; it should be at least 1.")
    if not command.prompt:
        raise ConfigError("prompt is empty; it should have at least one character.")
    if not 0 <= command.seed < 2**32:
        raise ConfigError(f"seed is {command.seed}; it should be in [0, 2^32).")
    try:
        command.prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"prompt is not valid Unicode at character {error.start} ({error.reason}).") from None
    loaded = load_run(command.run_dir, command.step)
    for step, reason in loaded.skipped:
        print(f"atlasjax: the checkpoint of step {step} is unusable: {reason}", file=sys.stderr)
    prompt = loaded.tokenizer.encode(command.prompt)[None]
    try:
        blocks = stream(
            loaded.model, prompt, command.max_tokens, config=command.sampling, seed=command.seed,
            vocab_size=loaded.tokenizer.vocab_size,
        )  # fmt: skip
    except ValueError as error:  # e.g. more tokens than the model has positions
        raise ConfigError(str(error)) from error
    print(command.prompt, end="", flush=True)
    for piece in text_pieces(loaded.tokenizer, (np.asarray(block)[0] for block in blocks)):
        print(piece, end="", flush=True)
    print()


def text_pieces(tokenizer: Tokenizer, blocks: Iterator[np.ndarray]) -> Iterator[str]:
    """Yields the text of a token stream as it becomes available. A character split between tokens is held until complete."""
    tokens: list[int] = []
    shown = 0
    text = ""
    for block in blocks:
        tokens.extend(block.tolist())
        text = tokenizer.decode(tokens)
        complete = len(text.rstrip("\ufffd"))
        if complete > shown:
            yield text[shown:complete]
            shown = complete
    if text[shown:]:
        yield text[shown:]
