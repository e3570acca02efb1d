"""The order of a command line, and names of options that other programs have."""

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence

# What people type who know other programs → the option here, if the command has it.
_OTHER_NAMES = {
    "lr": "optimizer.learning-rate",
    "max-lr": "optimizer.learning-rate",
    "wd": "optimizer.weight-decay",
    "warmup": "optimizer.warmup-steps",
    "num-warmup-steps": "optimizer.warmup-steps",
    "lr-scheduler": "optimizer.schedule",
    "lr-scheduler-type": "optimizer.schedule",
    "scheduler": "optimizer.schedule",
    "optim": "optimizer.name",
    "optimizer": "optimizer.name",
    "grad-clip": "optimizer.clip-norm",
    "gradient-clip": "optimizer.clip-norm",
    "max-grad-norm": "optimizer.clip-norm",
    "ema": "optimizer.ema-decay",
    "bs": "data.batch-size",
    "batch": "data.batch-size",
    "train-batch-size": "data.batch-size",
    "per-device-train-batch-size": "data.batch-size",
    "context-length": "data.sequence-length",
    "seq-len": "data.sequence-length",
    "seq-length": "data.sequence-length",
    "max-length": "data.sequence-length",
    "max-seq-length": "data.sequence-length",
    "block-size": "data.sequence-length",
    "dataset": "data.paths",
    "data": "data.paths",
    "data-dir": "data.paths",
    "train-file": "data.paths",
    "grad-accum": "accumulation",
    "gradient-accumulation-steps": "accumulation",
    "max-steps": "steps",
    "num-steps": "steps",
    "iterations": "steps",
    "max-iters": "steps",
    "num-train-steps": "steps",
    "epochs": "steps",
    "num-train-epochs": "steps",
    "output-dir": "run-dir",
    "out-dir": "run-dir",
    "save-dir": "run-dir",
    "output": "out",
    "model-dir": "run-dir",
    "checkpoint": "run-dir",
    "ckpt": "run-dir",
    "resume": "run-dir",
    "save-every": "checkpoint-every",
    "save-steps": "checkpoint-every",
    "eval-steps": "eval-every",
    "eval-interval": "eval-every",
    "logging-steps": "log-every",
    "log-interval": "log-every",
    "wandb": "trackers",
    "report-to": "trackers",
    "model-name": "preset",
    "arch": "preset",
    "hidden-size": "model.dim",
    "d-model": "model.dim",
    "n-layers": "model.num-layers",
    "layers": "model.num-layers",
    "n-heads": "model.num-heads",
    "heads": "model.num-heads",
    "precision": "model.dtype",
    "gradient-checkpointing": "model.remat",
    "max-new-tokens": "max-tokens",
    "num-samples": "samples",
    "num-workers": "workers",
    "jobs": "workers",
}


def _is_annotated(kind: object) -> bool:
    return typing.get_origin(kind) is typing.Annotated


def _options(cls: type, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """The options of a dataclass: (dotted name, the word that goes before its own options if it is an optional config)."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, *about = typing.get_args(hints[field.name]) if _is_annotated(hints[field.name]) else (hints[field.name],)
        named = [one.name for one in about if getattr(one, "name", None) is not None]  # tyro.conf.arg(name=…)
        name = prefix + (named[0] if named else field.name.replace("_", "-"))
        optional = next((one for one in typing.get_args(kind) if dataclasses.is_dataclass(one)), None)
        if dataclasses.is_dataclass(kind):
            yield from _options(typing.cast(type, kind), f"{name}." if name else prefix)
        elif isinstance(optional, type):
            words = re.sub(r"(?<!^)(?=[A-Z][a-z])", "-", optional.__name__).lower()
            yield name, f"{name}:{words}"
            yield from _options(optional, f"{name}.")
        else:
            yield name, None


def ordered(cls: type, arguments: Sequence[str]) -> list[str]:
    """A command line in the order that tyro needs: the options of an optional config come last, after the word that chooses it.

    People need to know neither the order nor the word: `--model.caching.segment-size 64` alone is enough.

    Args:
      cls: the dataclass of the command's options.
      arguments: the command line.
    """
    words = {name: word for name, word in _options(cls) if word is not None}
    rest: list[str] = []
    own: dict[str, list[str]] = {}
    into = rest
    for argument in arguments:
        name, _, choice = argument.partition(":")
        if name in words and choice.lower() in ("none", words[name].partition(":")[2]):
            if choice.lower() == "none":
                words[name] = argument
            into = own.setdefault(name, [])
            continue
        if argument.startswith("--"):
            option = argument.removeprefix("--").partition("=")[0].replace("_", "-")
            inside = [name for name in words if option.startswith(f"{name}.")]
            for name in inside:
                own.setdefault(name, [])
            into = own[max(inside, key=len)] if inside else rest
        into.append(argument)
    return [*rest, *(x for name, word in words.items() if name in own for x in (word, *own[name]))]


def other_name(cls: type, option: str) -> str | None:
    """The option of a command that is meant by one that it does not have, such as "--lr"; None if no other program has it."""
    name = option.removeprefix("--").partition("=")[0].replace("_", "-")
    known = [each for each, _ in _options(cls)]
    meant = _OTHER_NAMES.get(name)
    if meant in known:
        return f"--{meant}"
    same = [each for each in known if each.rpartition(".")[2] == name]
    return f"--{min(same, key=lambda each: each.count('.'))}" if same else None
