"""The evaluations of a run: its own held-out text and its named texts, for the parameters and for their moving average."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from atlasjax.data.config import DataConfig
from atlasjax.data.pipeline import Pipeline, make_pipeline
from atlasjax.data.text import Errors
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.evaluate.lm import LanguageModelResult, evaluate
from atlasjax.train.config import HELD_OUT, parse_sets
from atlasjax.train.step import EvalStep

_SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"), "parquet": (".parquet",)}  # source → of its files


def text_data(
    data: DataConfig, paths: tuple[str, ...], *, encoding: str | None = None, errors: Errors | None = None
) -> DataConfig:
    """The data of a run with other files as validation text, all of which is read: text, or JSON lines or Parquet by the suffix.

    Args:
      data: that of the run.
      paths: of the files.
      encoding, errors: see `DataConfig`. None: those of `data`, where the files have bytes to decode.

    Raises:
      ValueError: the files are of several of these kinds, or they cannot have such an encoding.
    """
    kind = lambda path: next((name for name, ends in _SUFFIXES.items() if path.lower().endswith(ends)), "text")
    source = kind(paths[0])
    other = next((path for path in paths if kind(path) != source), None)
    if other is not None:
        raise ValueError(
            f"text is {paths[0]!r} ({source}) and {other!r} ({kind(other)}); all files must be of one kind."
        )
    # Parquet has no bytes to decode.
    first, second = (data.encoding, data.errors) if source != "parquet" else ("utf-8", "strict")
    return dataclasses.replace(
        data, source=source, source_options="{}", paths=paths, validation_paths=paths, weights=(), tfds_validation_split="",
        packing="contiguous", held_out="auto", encoding=encoding or first, errors=errors or second,
    )  # fmt: skip


def evaluation_data(
    data: DataConfig, sets: tuple[str, ...], tokenizer: Tokenizer, process_index: int = 0, process_count: int = 1
) -> dict[str, Pipeline]:
    """The batches of each evaluation of a run: "held-out", if something is held out, and the named sets.

    Raises:
      ValueError, FileNotFoundError: as `make_pipeline`; the message begins with the name of the set.
    """
    where = (process_index, process_count)
    found = {HELD_OUT: make_pipeline(data, tokenizer, "validation", *where)} if data.has_validation else {}
    for name, paths in parse_sets(sets).items():
        try:
            found[name] = make_pipeline(text_data(data, paths), tokenizer, "validation", *where)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"evaluation set {name!r}: {error}") from error
    return found


def evaluator(
    data: dict[str, Pipeline],
    make_step: Callable[[int | None], EvalStep],
    max_batches: int | None,
    put: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]],
) -> Callable[[PyTree], dict[str, LanguageModelResult]]:
    """Returns params → name → result, in the order of the names.

    Args:
      data: name → batches (`evaluation_data`).
      make_step: bound on the segments per row → evaluation step (`step.eval_sums`).
      max_batches: number of batches of each. None: all.
      put: places a host batch on the devices.
    """
    # Texts with the same bound share one compiled program.
    steps = {bound: make_step(bound) for bound in dict.fromkeys(pipeline.max_segments for pipeline in data.values())}
    return lambda params: {
        name: evaluate(steps[pipeline.max_segments], params, pipeline, max_batches=max_batches, put=put)
        for name, pipeline in data.items()
    }
