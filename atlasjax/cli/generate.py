"""`atlasjax generate`."""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import numpy as np
import tyro

from atlasjax import storage
from atlasjax.cli.parsing import parse
from atlasjax.generate import Context, SamplingConfig, TextStream, load_context, read, save_context, stream
from atlasjax.generate.room import check_room
from atlasjax.interop.text_ends import text_ends
from atlasjax.nn import ModelConfig
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.load import load_run


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


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    command = parse(GenerateCommand, "generate", "Lets a trained model continue a text.", arguments)
    prompt, text = _checked(command)
    loaded = load_run(command.run_dir, command.step, ema=command.ema, decodes=True)
    for step, reason in loaded.skipped:
        print(f"atlasjax: the checkpoint of step {step} is unusable: {reason}", file=sys.stderr)
    model, tokenizer = loaded.model, loaded.tokenizer
    tokens = tokenizer.encode(text or prompt)
    with user_errors():  # e.g. more tokens than the model has positions, or the memory of another model
        context = None
        if command.memory is not None:
            context = load_context(model, command.memory)
            if len(context.num_tokens) != 1:
                raise ConfigError(
                    f"memory is {command.memory!r}, which has {len(context.num_tokens)} texts; it should have one."
                )
            print(f"atlasjax: {command.memory}: {_size_line(model.config, context)}", file=sys.stderr)
        if context is None and not len(tokens):
            raise ConfigError(
                f"the text to continue, {(text or prompt)[:40]!r}, has no token in the tokenizer of this run."
            )
        longest = len(tokens) + (0 if context is None else int(context.num_tokens.max()))
        if command.save_memory is None:
            longest += command.max_tokens
            model.check_length(longest, "prompt and max_tokens")
            before = longest - command.max_tokens
            check_room(model, ("samples", command.samples), ("max_tokens", command.max_tokens), before=before)
        if command.save_memory is not None:
            if len(tokens):
                context = read(model, tokens[None], context=context, max_length=longest)
            assert context is not None
            save_context(model, context, command.save_memory)
            print(f"{command.save_memory}: {_size_line(model.config, context)}")
            return
        blocks = stream(
            model, tokens[None] if len(tokens) else None, command.max_tokens, config=command.sampling, seed=command.seed,
            vocab_size=tokenizer.vocab_size, context=context, num_samples=command.samples,
        )  # fmt: skip
        ends = text_ends(command.run_dir).ends
    texts = [TextStream(tokenizer, tokens.tolist(), command.stop, ends) for _ in range(command.samples)]
    _print(prompt, texts, blocks)


def _checked(command: GenerateCommand) -> tuple[str, str]:
    """The prompt, and the text of the prompt file, after checking everything that needs no model."""
    for name in ("max_tokens", "samples"):
        if getattr(command, name) < 1:
            raise ConfigError(f"{name} is {getattr(command, name)}; it should be at least 1.")
    if not 0 <= command.seed < 2**32:
        raise ConfigError(f"seed is {command.seed}; it should be in [0, 2^32).")
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


def _size_line(config: ModelConfig, context: Context) -> str:
    """What a context takes, beside attention of the same shape."""
    count = int(context.num_tokens.max())
    per_token = config.num_layers * config.num_heads * (config.resolved_head_dim + config.value_dim)
    attention = count * per_token * np.dtype(config.dtype).itemsize
    return f"{count:,} tokens in {context.num_bytes:,} bytes; keys and values of attention of this shape: {attention:,} bytes"


def _print(prompt: str, texts: Sequence[TextStream], blocks: Iterator[jax.Array]) -> None:
    """Prints one text as it is generated; of several, each with a heading when all are complete."""
    alone = len(texts) == 1
    if alone:
        print(prompt, end="", flush=True)
    pieces = [""] * len(texts)
    for block in blocks:
        new = [text.feed(tokens) for text, tokens in zip(texts, np.asarray(block), strict=True)]
        if alone:
            print(new[0], end="", flush=True)
        pieces = [before + piece for before, piece in zip(pieces, new, strict=True)]
        if all(text.stopped for text in texts):
            break
    rest = [text.finish() for text in texts]
    if alone:
        print(rest[0])
        return
    for number, (piece, end) in enumerate(zip(pieces, rest, strict=True), 1):
        print(f"--- sample {number} of {len(texts)}\n{prompt}{piece}{end}")
