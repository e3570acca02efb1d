"""`atlasjax evaluate`."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Annotated

import jax
import numpy as np
import tyro
from flax import nnx

from atlasjax.cli.parsing import parse
from atlasjax.cli.report import baselines
from atlasjax.cli.tasks import TaskOptions, run_tasks
from atlasjax.data.config import DataConfig
from atlasjax.data.pipeline import make_pipeline
from atlasjax.data.prepared import load_tokens
from atlasjax.evaluate.lm import LanguageModelResult, evaluate, evaluate_stream
from atlasjax.train import state as state_lib
from atlasjax.train.errors import ConfigError
from atlasjax.train.load import LoadedRun, load_run
from atlasjax.train.step import eval_sums


@dataclasses.dataclass(frozen=True)
class EvaluateCommand:
    """Options of `atlasjax evaluate`."""

    run_dir: str = "runs/atlas-tiny"
    """Folder of the run."""
    step: int | None = None
    """Step of the checkpoint. None: the newest usable one."""
    text: tuple[str, ...] = ()
    """Text files or folders to evaluate on. None given: the run's own held-out text."""
    max_batches: int | None = None
    """Maximum number of batches. None: the whole text."""
    stream: bool = False
    """Read the text as one long stream through the constant-size cache instead of in sequences of the training length."""
    piece: int = 512
    """Tokens read at a time with --stream."""
    harness: Annotated[TaskOptions, tyro.conf.arg(name="")] = dataclasses.field(default_factory=TaskOptions)


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    command = parse(
        EvaluateCommand, "evaluate", "Measures a trained model on held-out text, or on tasks of lm-eval.", arguments
    )
    for name in ("max_batches", "piece"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it should be at least 1.")
    if command.harness.tasks:
        _run_tasks(command)
        return
    loaded = load_run(command.run_dir, command.step)
    for step, reason in loaded.skipped:
        print(f"atlasjax: the checkpoint of step {step} is unusable: {reason}", file=sys.stderr)
    data = loaded.config.data
    if command.text:
        data = dataclasses.replace(
            data,
            source="text",
            paths=command.text,
            validation_paths=command.text,
            packing="contiguous",
            held_out="auto",
        )
    try:
        result = _streamed(command, loaded, data) if command.stream else _parallel(command, loaded, data)
        references = {} if command.text else baselines(data)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error
    print(f"{command.run_dir}, step {loaded.step}: {result.tokens:,} tokens, {result.num_bytes:,} bytes")
    for name, value in {
        "loss (nats per token)": result.loss, "perplexity per token": result.perplexity, "bits per byte": result.bits_per_byte,
        **{f"bits per byte, {name}": value for name, value in references.items()},
    }.items():  # fmt: skip
        print(f"  {name:<36}{value:9.4f}")


def _run_tasks(command: EvaluateCommand) -> None:
    """Runs the tasks. Options that say which text is read do not go with them."""
    for name in ("text", "max_batches"):
        if getattr(command, name) != getattr(EvaluateCommand, name):
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --tasks.")
    run_tasks(command.run_dir, command.step, command.harness, stream=command.stream)


def _parallel(command: EvaluateCommand, loaded: LoadedRun, data: DataConfig) -> LanguageModelResult:
    pipeline = make_pipeline(data, loaded.tokenizer, "validation")
    graphdef, params = nnx.split(loaded.model, nnx.Param)
    step = jax.jit(eval_sums(graphdef, loaded.tokenizer.bytes_per_token, max_segments=pipeline.max_segments))
    return evaluate(step, state_lib.pure(params), pipeline, max_batches=command.max_batches)


def _streamed(command: EvaluateCommand, loaded: LoadedRun, data: DataConfig) -> LanguageModelResult:
    tokens = load_tokens(data, loaded.tokenizer, "validation")
    if command.max_batches is not None:
        tokens = tokens[: command.max_batches * data.batch_size * data.sequence_length + 1]
    table = loaded.tokenizer.bytes_per_token
    result, losses = evaluate_stream(loaded.model, tokens, table, piece=command.piece)
    print("bits per byte by position in the stream")
    start = 0
    while start < losses.shape[1]:
        end = min(losses.shape[1], max(1024, 4 * start))
        num_bytes = int(np.asarray(table)[tokens[start + 1 : end + 1]].sum())
        print(f"  {start:>9,} to {end:>9,}: {losses[0, start:end].sum() / math.log(2) / num_bytes:.4f}")
        start = end
    return result
