"""Numbers that nothing should have: on every numeric option of every command, in every numeric field of a run's config, and as the
counts of the Python API. A refusal names the option, the field or the argument; nothing may fill memory, which is limited here."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import random
import resource
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from atlasjax.cli import evaluate, info, prepare, serve, tune
from atlasjax.cli import generate as generate_command
from atlasjax.cli import train as train_command
from atlasjax.config_json import from_dict, to_dict
from atlasjax.evaluate.lm import evaluate_stream
from atlasjax.evaluate.scoring import Scorer
from atlasjax.generate import SamplingConfig, generate, read
from atlasjax.mixers.elastic import banks
from atlasjax.nn import ModelConfig
from atlasjax.serve import BatchConfig, batching
from atlasjax.train import TrainConfig, load_run
from experiments.faults import small
from experiments.faults.run import Case, case, some

VALUES = (
    "9" * 21, "-" + "9" * 21, "1" + "0" * 400, "1e400", "-1e400", "nan", "inf", "-inf", "-0", "", " ", "1_000", "٣", "0x10",
    "1e-400", "2147483648", "9223372036854775808", "1e300", "0.1", "true",
)  # fmt: skip
_NUMBERS: tuple[Any, ...] = (
    10**21, -(10**21), 10**400, 1e300, math.inf, -math.inf, math.nan, -0.0, "5", True, [1], {}, 2**31, 2**63, 0.5, -1,
)  # fmt: skip
_MAY_BE_INFINITE = "memory-norm-limit"  # its infinity means never
_GIB = 2**30


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Three values for each option and each field, and all for the counts of the API."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place, limited_memory(6 * _GIB), contextlib.chdir(place):
        folder = pathlib.Path(place)
        small.trained(folder, folder / "run", 2)
        model = load_run("run").model
        every = [*_commands(rng), *_fields(rng), *_calls(model)]
        yield from some(every, most, rng)


@contextlib.contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """At most so many more bytes of addresses than this process has: what would fill memory ends with a MemoryError instead."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _commands(rng: random.Random) -> Iterator[Case]:
    for name, (command, line, patches) in _COMMANDS.items():
        for option, kind in options(command):
            for value in rng.sample(VALUES, 3):
                given = [*line, f"--{option}={value}"]
                yield case(f"{name} --{option}={value[:30]!r}", _given, given, option, kind, value, patches)


def options(command: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every numeric option of a command: its name, and int or float."""
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        hint, name = hints[field.name], f"{field.name.replace('_', '-')}"
        about = getattr(hint, "__metadata__", ())
        hint = typing.get_args(hint)[0] if about else hint
        named = [one.name for one in about if getattr(one, "name", None) is not None]
        if dataclasses.is_dataclass(hint):
            inside = prefix if named == [""] else f"{prefix}{name}."
            yield from options(typing.cast(type, hint), inside)
            continue
        kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        for kind in (int, float):
            if kind in kinds:
                yield f"{prefix}{named[0] if named else name}", kind


def _given(line: list[str], option: str, kind: type, value: str, patches: Callable[[], list[Any]]) -> str:
    last = option.rpartition(".")[2]
    words = (last, last.replace("-", "_"), last.replace("-", " "))
    how = small.asked(line, words, patches())
    may = _is_number(kind, value) or (option.endswith(_MAY_BE_INFINITE) and value in ("inf", "1e400"))
    return "wrong" if how == "right" and not may else how


def _is_number(kind: type, value: str) -> bool:
    try:
        return math.isfinite(kind(value))
    except (ValueError, OverflowError):
        return False


_DATA = ("--data.source", "text", "--data.paths", "text.txt")
_RUN = ("--run-dir", "run")
_COMMANDS: dict[str, tuple[type, list[str], Callable[[], list[Any]]]] = {
    "train": (
        train_command.TrainCommand,
        ["train", "--preset", "linear-attention-tiny", *_DATA, "--run-dir", "new", "--data.sequence-length", "16"],
        small.not_trained,
    ),
    "tune": (
        tune.TuneCommand,
        ["tune", "--preset", "linear-attention-tiny"],
        lambda: [small.left_out(tune, "_tune", lambda *_: (None, [])), small.left_out(tune, "_saved", lambda *_: [])],
    ),
    "generate": (generate_command.GenerateCommand, ["generate", *_RUN, "--max-tokens", "4", "--prompt", "a"], list),
    "evaluate": (evaluate.EvaluateCommand, ["evaluate", *_RUN, "--max-batches", "1"], list),
    "evaluate --stream": (evaluate.EvaluateCommand, ["evaluate", *_RUN, "--max-batches", "1", "--stream"], list),
    "evaluate --tasks": (
        evaluate.EvaluateCommand,
        ["evaluate", *_RUN, "--tasks", "niah_1", "--lengths", "1k", "--samples", "2"],
        lambda: [small.left_out(evaluate, "run_long_context")],
    ),
    "serve": (
        serve.ServeCommand,
        ["serve", *_RUN, "--port", "0"],
        small.not_served,
    ),
    "prepare": (
        prepare.PrepareCommand,
        ["prepare", *_DATA, "--workers", "1", "--data.tokenizer", "byte"],
        lambda: [small.left_out(prepare, "prepare", _prepared), small.left_out(prepare, "_summary")],
    ),
    "info": (info.InfoCommand, ["info", "--preset", "linear-attention-tiny"], list),
}  # fmt: skip


def _prepared(data: Any, out: str, **options: Any) -> Any:
    """The real thing, in a folder of its own."""
    from atlasjax.data.preparation import prepare

    with tempfile.TemporaryDirectory() as place:
        return prepare(data, place, **options)


def _fields(rng: random.Random) -> Iterator[Case]:
    """Each number of a config, as a file has it."""
    saved = to_dict(TrainConfig(small.MODEL))
    for path in _places(saved):
        for value in rng.sample(_NUMBERS, 3):
            text = json.dumps(_with(saved, path, value))
            if isinstance(value, int) and not isinstance(value, bool) and value == 10**400:
                text = text.replace("Infinity", "1" + "0" * 400)
            yield case(f"config {'.'.join(path)} = {str(value)[:30]}", _read, text, path)


def _places(value: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, inside in value.items():
        if isinstance(inside, dict):
            yield from _places(inside, (*before, name))
        elif isinstance(inside, int | float) and not isinstance(inside, bool):
            yield (*before, name)


def _with(value: dict[str, Any], path: tuple[str, ...], new: Any) -> dict[str, Any]:
    name, *rest = path
    return {**value, name: _with(value[name], tuple(rest), new) if rest else new}


def _read(text: str, path: tuple[str, ...]) -> str:
    """A config that is taken must be one that a run can be checked with: nothing of its sizes is made."""

    def fits(config: TrainConfig) -> bool:
        value = functools.reduce(getattr, path, config)
        return isinstance(value, int) or math.isfinite(value) or path[-1] == "memory_norm_limit"

    return small.refused(lambda: from_dict(TrainConfig, json.loads(text)), (path[-1],), right=fits)


# Counts that are kept as they are given: nothing is made of them here.
_AS_IT_IS = ("piece", "top_k", "batch_size", "vocab_size", "dim", "num_layers", "num_heads", "head_dim")


def _calls(model: Any) -> Iterator[Case]:
    tokens = np.zeros((1, 4), np.int32)
    table = np.ones(model.config.vocab_size, np.int64)
    huge: dict[str, tuple[Callable[[Any], Any], str]] = {
        "generate num_tokens": (lambda n: generate(model, tokens, n), "num_tokens"),
        "generate num_samples": (lambda n: generate(model, tokens, 2, num_samples=n), "num_samples"),
        "generate seed": (lambda n: generate(model, tokens, 2, seed=n), "seed"),
        "read max_length": (lambda n: read(model, tokens, max_length=n), "max_length"),
        "init_cache batch_size": (lambda n: model.init_cache(n, 8), "batch_size"),
        "Scorer batch_size": (lambda n: Scorer(model, batch_size=n), "batch_size"),
        "evaluate_stream piece": (lambda n: evaluate_stream(model, tokens, table, piece=n), "piece"),
        "SamplingConfig top_k": (lambda n: SamplingConfig(top_k=n), "top_k"),
        "Batcher slots": (lambda n: batching.Batcher(model, _Tokens(), BatchConfig(slots=n)), "slots"),
        "banks.load blocks": (lambda n: banks.load(4, 2, n, cache_dir="banks"), "blocks"),
        "banks.load order": (lambda n: banks.load(n, 2, 1, cache_dir="banks"), "order"),
        **{
            f"ModelConfig {name}": (lambda n, name=name: ModelConfig(**{name: n}), name)
            for name in (*_AS_IT_IS[3:], "value_expansion", "conv_width", "mlp_dim")
        },
    }
    for name, (call, word) in huge.items():
        for value in (10**20, 10**400, -(10**20), 1e300, math.nan, math.inf, True, "3", None):
            takes_none = value is None and word in ("top_k", "head_dim", "mlp_dim", "max_length")
            is_large = word in (*_AS_IT_IS, "value_expansion", "conv_width", "mlp_dim")
            may = takes_none or (is_large and isinstance(value, int) and not isinstance(value, bool) and value > 0)
            yield case(f"{name}={str(value)[:24]}", _called, call, value, word, may)


def _called(call: Callable[[Any], Any], value: Any, word: str, may: bool) -> str:
    return small.refused(lambda: jax.block_until_ready(call(value)), (word,), right=lambda _: may)


class _Tokens:
    """The part of a tokenizer that a server's slots need."""

    vocab_size = 300

    def decode(self, ids: Any) -> str:
        return ""
