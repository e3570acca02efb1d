"""The order of a command line, and names of options that other programs have."""

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence

# An option here → what it is called in other programs, for people who know those.
_NAMES_ELSEWHERE = {
    "optimizer.learning-rate": "lr max-lr",
    "optimizer.weight-decay": "wd",
    "optimizer.warmup-steps": "warmup num-warmup-steps",
    "optimizer.schedule": "lr-scheduler lr-scheduler-type scheduler",
    "optimizer.name": "optim optimizer",
    "optimizer.clip-norm": "grad-clip gradient-clip max-grad-norm",
    "optimizer.ema-decay": "ema",
    "data.batch-size": "bs batch train-batch-size per-device-train-batch-size",
    "data.sequence-length": "context-length seq-len seq-length max-length max-seq-length block-size",
    "data.paths": "dataset data data-dir train-file",
    "accumulation": "grad-accum gradient-accumulation-steps",
    "steps": "max-steps num-steps iterations max-iters num-train-steps epochs num-train-epochs",
    "run-dir": "output-dir out-dir save-dir model-dir checkpoint ckpt resume",
    "out": "output",
    "checkpoint-every": "save-every save-steps",
    "eval-every": "eval-steps eval-interval",
    "log-every": "logging-steps log-interval",
    "trackers": "wandb report-to",
    "preset": "model-name arch",
    "model.dim": "hidden-size d-model",
    "model.num-layers": "n-layers layers",
    "model.num-heads": "n-heads heads",
    "model.dtype": "precision",
    "model.remat": "gradient-checkpointing",
    "max-tokens": "max-new-tokens",
    "samples": "num-samples",
    "workers": "num-workers jobs",
}
_OTHER_NAMES = {name: option for option, names in _NAMES_ELSEWHERE.items() for name in names.split()}


def option_name(field: "dataclasses.Field[object]", kind: object) -> str:
    """The name of the option of a field of this type, as tyro gives it; "" if its own options stand in its place."""
    named = (one.name for one in getattr(kind, "__metadata__", ()) if getattr(one, "name", None) is not None)
    return next(named, field.name.replace("_", "-"))  # the first comes from tyro.conf.arg(name=…)


def _options(cls: type, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """The options of a dataclass: (dotted name, the word that goes before its own options if it is an optional config)."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        name = prefix + option_name(field, kind)
        kind = typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
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
