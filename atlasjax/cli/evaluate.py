"""`atlasjax evaluate`."""

import dataclasses
import math
import sys
from collections.abc import Sequence

import jax
from flax import nnx

from atlasjax.cli.long_context import (
    checked,
    is_long_context,
    prepare_long_context,
    run_long_context,
)
from atlasjax.cli.options.evaluate import EvaluateCommand
from atlasjax.cli.report import baselines
from atlasjax.cli.tasks import chat_template, load_tasks, run_tasks
from atlasjax.data.config import DataConfig
from atlasjax.data.pipeline import TextTooShortError, make_pipeline
from atlasjax.data.prepared import load_tokens
from atlasjax.evaluate.lm import LanguageModelResult, evaluate_stream
from atlasjax.train import state as state_lib
from atlasjax.train.config import HELD_OUT, TrainConfig, parse_sets
from atlasjax.train.errors import ConfigError
from atlasjax.train.evaluations import evaluator, text_data
from atlasjax.train.load import LoadedRun, load_run
from atlasjax.train.step import eval_sums


def run(command: EvaluateCommand) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    if command.harness.tasks:
        _run_tasks(command)
        return
    loaded = _loaded(command)
    try:
        texts = _texts(command, loaded.config)
        results = (_streamed if command.stream else _parallel)(command, loaded, texts)
        references = baselines(texts[HELD_OUT]) if HELD_OUT in texts else {}
    except TextTooShortError as error:
        raise ConfigError(f"{error} --stream reads a text of any length.") from error
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error
    whole = "" if command.max_batches is None else ", whole text"
    for text, result in results.items():
        what = text if text not in ("", HELD_OUT) else f"{command.run_dir}, step {loaded.step}"
        print(f"{what}: {result.tokens:,} tokens, {result.num_bytes:,} bytes")
        for name, value in {
            "loss (nats per token)": result.loss, "perplexity per token": result.perplexity, "bits per byte": result.bits_per_byte,
            **{f"bits per byte, {name}{whole}": value for name, value in (references if text == HELD_OUT else {}).items()},
        }.items():  # fmt: skip
            print(f"  {name:<36}{value:9.4f}")


def _run_tasks(command: EvaluateCommand) -> None:
    """Runs the tasks: first tasks of lm-eval, then tasks that are generated here."""
    options = command.harness
    ours = [name for name in options.tasks if is_long_context(name)]
    others = tuple(name for name in options.tasks if not is_long_context(name))
    # Options that do not go with a task are refused before anything runs.
    both = {"tasks", "batch_size", "log_samples"}
    refused: list[tuple[object, str, Sequence[str]]] = [
        (command, name, options.tasks) for name in ("max_batches", "piece")
    ]
    if not others:
        refused += [(command, "stream", ours)]
        refused += [(options, field.name, ours) for field in dataclasses.fields(options) if field.name not in both]
    if not ours:
        refused += [(command, name, others) for name in ("text", "encoding", "errors")]
        refused += [(command.long_context, field.name, others) for field in dataclasses.fields(command.long_context)]
    for given, name, named in refused:
        if named and getattr(given, name) != getattr(type(given), name):
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --tasks {named[0]}.")
    if ours:
        checked(ours, command.long_context)
    tasks = load_tasks(dataclasses.replace(options, tasks=others), stream=command.stream) if others else None
    chat = chat_template(command.run_dir) if options.apply_chat_template else None
    loaded = _loaded(command)
    ready = None
    if ours:  # what is wrong with these tasks is said before the others run
        ready = prepare_long_context(
            command.run_dir, loaded, ours, command.long_context, batch_size=options.batch_size, ema=command.ema,
            text=_given_text(command, loaded.config) if command.text else None,
        )  # fmt: skip
    if tasks is not None:
        run_tasks(command.run_dir, loaded, tasks, options, stream=command.stream, ema=command.ema, chat=chat)
    if ready is not None:
        run_long_context(ready, log_samples=options.log_samples)


def _loaded(command: EvaluateCommand) -> LoadedRun:
    decodes = command.stream or any(map(is_long_context, command.harness.tasks))
    loaded = load_run(command.run_dir, command.step, ema=command.ema, decodes=decodes)
    for step, reason in loaded.skipped:
        print(f"atlasjax: the checkpoint of step {step} is unusable: {reason}", file=sys.stderr)
    return loaded


def _texts(command: EvaluateCommand, config: TrainConfig) -> dict[str, DataConfig]:
    """The texts to evaluate on, by name: the text of --text, or the run's held-out text and its evaluation sets."""
    if command.text:
        return {"": _given_text(command, config)}
    sets = {name: text_data(config.data, paths) for name, paths in parse_sets(config.evaluation_sets).items()}
    return ({} if sets and not config.data.has_validation else {HELD_OUT: config.data}) | sets


def _given_text(command: EvaluateCommand, config: TrainConfig) -> DataConfig:
    """The data of --text."""
    return text_data(config.data, command.text, encoding=command.encoding, errors=command.errors)


def _parallel(
    command: EvaluateCommand, loaded: LoadedRun, texts: dict[str, DataConfig]
) -> dict[str, LanguageModelResult]:
    graphdef, params = nnx.split(loaded.model, nnx.Param)
    step = lambda max_segments: jax.jit(
        eval_sums(graphdef, loaded.tokenizer.bytes_per_token, max_segments=max_segments)
    )
    data = {name: make_pipeline(text, loaded.tokenizer, "validation") for name, text in texts.items()}
    return evaluator(data, step, command.max_batches, jax.device_put)(state_lib.pure(params))


def _streamed(
    command: EvaluateCommand, loaded: LoadedRun, texts: dict[str, DataConfig]
) -> dict[str, LanguageModelResult]:
    return {name: _stream(command, loaded, text, name) for name, text in texts.items()}


def _stream(command: EvaluateCommand, loaded: LoadedRun, data: DataConfig, name: str) -> LanguageModelResult:
    tokens, sizes = load_tokens(data, loaded.tokenizer, "validation")
    if command.max_batches is not None:
        most = command.max_batches * data.batch_size * data.sequence_length + 1
        tokens, sizes = tokens[:most], sizes[:most]
    if len(tokens) < 2:
        what = f"text is {command.text[0]!r}" if command.text else f"the text {name!r} of the run is short"
        raise ConfigError(f"{what}; it should have at least two tokens, and has {len(tokens)}.")
    table = loaded.tokenizer.bytes_per_token
    result, losses = evaluate_stream(loaded.model, tokens, table, piece=command.piece, sizes=sizes)
    print("bits per byte by position in the stream" + (f" of {name}" if name not in ("", HELD_OUT) else ""))
    start = 0
    while start < losses.shape[1]:
        # Ever longer pieces: a loss changes with the logarithm of the position.
        end = min(losses.shape[1], max(1024, 4 * start))
        num_bytes = int(sizes[start + 1 : end + 1].sum())
        print(f"  {start:>9,} to {end:>9,}: {losses[0, start:end].sum() / math.log(2) / num_bytes:.4f}")
        start = end
    return result
