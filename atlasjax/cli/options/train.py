"""Options of `atlasjax train`."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import tyro

from atlasjax.cli.parsing import admit_given, parse, pop_option
from atlasjax.train.config import TrainConfig
from atlasjax.train.defaults import default_config
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.runs import run_config

_DESCRIPTION = """Trains a language model, or continues training the one in --run-dir.

Without arguments: preset atlas-tiny, on the Python language reference that comes with Python, a few minutes on a CPU. --preset
chooses the model and the defaults of all other options; --help after it shows them. Without --preset, a --run-dir that holds a run
gives the defaults: what that run was saved with. --init-from RUN starts a new run from the parameters of another one, which then
gives the defaults."""


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Options of `atlasjax train`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "atlas-tiny"
    """Model and training defaults, "<rule>-<size>"."""
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


def read(arguments: Sequence[str]) -> Request:
    """Parses the command line. Raises ConfigError, or SystemExit after help."""
    admit_given(arguments)
    given, rest = pop_option(arguments, "preset")
    run_dir, _ = pop_option(arguments, "run-dir")
    saved = run_config(run_dir) if run_dir is not None and given is None else None
    init_from, _ = pop_option(arguments, "init-from")
    if saved is None and init_from is not None:
        saved = _base(init_from, run_dir, given)
    preset = TrainCommand.preset if given is None else given
    with user_errors():
        default = default_config(preset) if saved is None else saved
    command = parse(TrainCommand, "train", _DESCRIPTION, rest, TrainCommand(default, preset))
    own = saved is not None or pop_option(rest, "model.vocab-size")[0] is not None
    return Request(command, preset if saved is None else None, own)


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
