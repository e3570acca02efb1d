"""`atlasjax generate`."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import numpy as np
import tyro

from atlasjax.cli.parsing import parse
from atlasjax.generate import SamplingConfig, TextStream, stream
from atlasjax.train.errors import ConfigError, user_errors
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
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    samples: int = 1
    """Number of texts. The prompt is read once."""
    seed: int = 0
    """The same seed gives the same text."""
    step: int | None = None
    """Step of the checkpoint. None: the newest usable one."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    command = parse(GenerateCommand, "generate", "Lets a trained model continue a text.", arguments)
    for name in ("max_tokens", "samples"):
        if getattr(command, name) < 1:
            raise ConfigError(f"{name} is {getattr(command, name)}; it should be at least 1.")
    if not command.prompt:
        raise ConfigError("prompt is empty; it should have at least one character.")
    if not 0 <= command.seed < 2**32:
        raise ConfigError(f"seed is {command.seed}; it should be in [0, 2^32).")
    for name, text in [("prompt", command.prompt), *(("stop", text) for text in command.stop)]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"{name} is not valid Unicode at character {error.start} ({error.reason}).") from None
    if "" in command.stop:
        raise ConfigError("stop is ''; a stop string should have at least one character.")
    loaded = load_run(command.run_dir, command.step)
    for step, reason in loaded.skipped:
        print(f"atlasjax: the checkpoint of step {step} is unusable: {reason}", file=sys.stderr)
    prompt = loaded.tokenizer.encode(command.prompt)
    with user_errors():  # e.g. more tokens than the model has positions
        blocks = stream(
            loaded.model, prompt[None], command.max_tokens, config=command.sampling, seed=command.seed,
            vocab_size=loaded.tokenizer.vocab_size, num_samples=command.samples,
        )  # fmt: skip
    texts = [TextStream(loaded.tokenizer, prompt.tolist(), command.stop) for _ in range(command.samples)]
    _print(command.prompt, texts, blocks)


def _print(prompt: str, texts: Sequence[TextStream], blocks: Iterator[jax.Array]) -> None:
    """Prints one text as it is generated; of several, each with a heading when all are complete."""
    if len(texts) == 1:
        print(prompt, end="", flush=True)
    pieces: list[str] = [""] * len(texts)
    for block in blocks:
        new = [text.feed(tokens) for text, tokens in zip(texts, np.asarray(block), strict=True)]
        if len(texts) == 1:
            print(new[0], end="", flush=True)
        pieces = [before + piece for before, piece in zip(pieces, new, strict=True)]
        if all(text.stopped for text in texts):
            break
    rest = [text.finish() for text in texts]
    if len(texts) == 1:
        print(rest[0])
        return
    for number, (piece, end) in enumerate(zip(pieces, rest, strict=True), 1):
        print(f"--- sample {number} of {len(texts)}\n{prompt}{piece}{end}")
