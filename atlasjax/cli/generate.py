"""`atlasjax generate`."""

import sys
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from atlasjax.cli.options.generate import GenerateCommand, checked
from atlasjax.generate import Context, TextStream, load_context, read, save_context, stream
from atlasjax.generate.room import check_room
from atlasjax.interop.text_ends import text_ends
from atlasjax.nn import ModelConfig
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.load import load_run


def run(command: GenerateCommand) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    prompt, text = checked(command)
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


def _size_line(config: ModelConfig, context: Context) -> str:
    """The size of a context, and the size of attention of the same shape."""
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
