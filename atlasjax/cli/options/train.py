"""Options of `atlasjax train`."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from atlasjax.cli.config_file import configured, read_config
from atlasjax.cli.parsing import admit_given, parse, pop_option
from atlasjax.data.files import check_there
from atlasjax.train.config import TrainConfig
from atlasjax.train.defaults import default_config
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.saving.runs import run_config

_DESCRIPTION = """Trains a language model, or continues training the one in --run-dir.

Without arguments: preset atlas-tiny, on the Python language reference that comes with Python, a few minutes on a CPU. --preset
chooses the model and the defaults of all other options; --help after it shows them. Without --preset, a --run-dir that holds a run
gives the defaults: what that run was saved with. --init-from RUN starts a new run from the parameters of another one, which then
gives the defaults. --config FILE replaces defaults by values of a file."""


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Options of `atlasjax train`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "atlas-tiny"
    """Model and training defaults, "<rule>-<size>"."""
    config_file: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """Options from a file (.toml or .json, with the fields of a run's config.json), or from the folder of a run. Options that are
    typed win."""
    add_caching: Literal["residual", "grm", "soup", "ssc"] | None = None
    """Adds Memory Caching with this aggregation to the model of --init-from, which starts with the same outputs."""
    segment_size: int = 256
    """Tokens after which --add-caching caches a memory."""
    add_memory: str | None = None
    """Adds a memory with this rule ("titans", "atlas", …), beside the mixer of every layer, to the model of --init-from. The new
    model starts with the same outputs."""
    add_window: int | None = None
    """Adds softmax attention over a window of this many tokens in the same way."""
    trust: tuple[str, ...] = ()
    """Modules of your own parts that files of a run may name, such as my_parts. Parts that this command names need none."""


class Request(NamedTuple):
    """A command line of `atlasjax train`.

    Attributes:
      command: its options.
      preset: the preset of the model; None if a run gives it.
      own_vocabulary: whether the vocabulary of the model is given, by an option or by a run.
    """

    command: TrainCommand
    preset: str | None
    own_vocabulary: bool


# Options that people set, in the order of the help. docs/training.md has the others.
SHOWN = {
    "preset": "model and defaults of all other options, <architecture>-<size> (`atlasjax info --names`)",
    "config": "options from a file: .toml, .json, or the folder of a run; options typed here win",
    "run-dir": "folder of the run; the same command goes on with what is in it",
    "init-from": "run whose parameters a new run starts from",
    "steps": "number of optimizer steps",
    "data.source": "embedded, text, jsonl, parquet, tfds, prepared, or package.module:Class",
    "data.paths": "files, folders or patterns of the text",
    "data.tokenizer": "byte, bpe:<size>, bpe:<file> or sentencepiece:<file>",
    "data.packing": "contiguous, or documents",
    "data.sequence-length": "tokens of a sequence",
    "data.batch-size": "sequences of a batch, over all devices",
    "optimizer.learning-rate": "peak of the learning rate",
    "optimizer.warmup-steps": "steps until the peak",
    "model.memory.rule": "rule of the memory (`atlasjax info --rules`)",
    "mesh.fsdp": "devices that parameters are divided over; mesh.data and mesh.tensor likewise",
    "eval-every": "steps between evaluations on held-out text",
    "checkpoint-every": "steps between checkpoints",
    "trackers": "where metrics go besides: wandb, or package.module:function",
    "seed": "seed of everything random but the order of the data",
}


def _short_help(default: TrainConfig, preset: str) -> str:
    """The options that people use, with their defaults."""
    values = {"preset": preset, "config": None}
    lines = []
    for name, what in SHOWN.items():
        value: Any = default
        if name in values:
            value = values[name]
        else:
            for part in name.replace("-", "_").split("."):
                value = getattr(value, part)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        lines.append(f"  --{name:<25}{what}{f' (default: {shown})' if shown not in ('', 'None') else ''}")
    return "\n".join(
        [
            "usage: atlasjax train [OPTIONS]",
            "",
            _DESCRIPTION,
            "",
            *lines,
            "",
            "`atlasjax train --help all` lists all options.",
        ]
    )


def read(arguments: Sequence[str]) -> Request:
    """Parses the command line. Raises ConfigError, or SystemExit after help."""
    admit_given(arguments)
    file, arguments = pop_option(arguments, "config")
    values = {} if file is None else read_config(file)
    given, rest = pop_option(arguments, "preset")
    if file is not None and given is None and "preset" in values:
        given = values["preset"]
        if not isinstance(given, str):
            raise ConfigError(f"the config file {file}: preset is {given!r}; it must be the name of a preset.")
    values.pop("preset", None)
    run_dir, _ = pop_option(arguments, "run-dir")
    saved = run_config(run_dir) if run_dir is not None and given is None and file is None else None
    init_from, _ = pop_option(arguments, "init-from")
    if saved is None and init_from is not None:
        saved = _base(init_from, run_dir, given)
    preset = TrainCommand.preset if given is None else given
    with user_errors():
        default = default_config(preset) if saved is None else saved
    if file is not None:
        default = configured(file, values, default)
    if (asked := _asks_for_help(rest)) == "short":
        print(_short_help(default, preset))
        raise SystemExit(0)
    if asked == "all":
        rest = ["--help"]
    command = parse(TrainCommand, "train", _DESCRIPTION, rest, TrainCommand(default, preset))
    data = command.config.data
    with user_errors():
        check_there((*data.paths, *data.validation_paths))
    own = (
        saved is not None
        or "vocab_size" in values.get("model", {})
        or pop_option(rest, "model.vocab-size")[0] is not None
    )
    return Request(command, preset if saved is None else None, own)


def _asks_for_help(arguments: Sequence[str]) -> Literal["short", "all"] | None:
    for argument, following in itertools.pairwise([*arguments, ""]):
        if argument in ("-h", "--help"):
            return "all" if following == "all" else "short"
    return None


def _base(init_from: str, run_dir: str | None, preset: str | None) -> TrainConfig:
    """The defaults of a new run that starts from the parameters of another."""
    if preset is not None:
        raise ConfigError(f"--preset {preset} and --init-from {init_from} both give the model; leave --preset out.")
    if run_dir is None:
        raise ConfigError(f"--init-from {init_from} needs --run-dir, the folder of the new run.")
    base = run_config(init_from)
    if base is None:
        raise ConfigError(f"init_from is {init_from!r}; there is no run in it.")
    return dataclasses.replace(base, run_dir=run_dir, init_from=None)
