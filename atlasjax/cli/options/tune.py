"""Options of `atlasjax tune`."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from atlasjax.check import number
from atlasjax.cli.parsing import parse, pop_option
from atlasjax.train.config import TrainConfig
from atlasjax.train.defaults import default_config
from atlasjax.train.errors import user_errors

_DESCRIPTION = """Checks and times the kernels of a model's memory on this machine's device, and remembers the fastest.

The options are those of `atlasjax train`; model, batch, sequence length and mesh decide what is measured. A kernel that does not
give the numbers of the definition is reported and never chosen. Training and `memory.scan` follow the choice wherever
`implementation` is None."""

SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class TuneCommand:
    """Options of `atlasjax tune`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "atlas-340m"
    """Model and sizes, "<rule>-<size>"."""
    seconds: float = SECONDS
    """About how long it may take, with compilation. Every kernel is timed at least three times."""
    share: str | None = None
    """A file to write the measurement to, in the form of the table that is shipped with atlasjax."""


def read(arguments: Sequence[str]) -> TuneCommand:
    """Parses and checks the command line. Raises ConfigError, or SystemExit after help."""
    given, rest = pop_option(arguments, "preset")
    preset = TuneCommand.preset if given is None else given
    with user_errors():
        default = default_config(preset)
    command = parse(TuneCommand, "tune", _DESCRIPTION, rest, TuneCommand(default, preset))
    with user_errors():
        number("tune", "seconds", command.seconds, least=0)
        named = command.config.model.memory.implementation
        if named is not None and ":" in named:
            raise ValueError(
                f"model.memory.implementation is {named!r}, which only calls that name it use. Backends that are registered "
                "(`memory.register_backend`) are measured: leave it out, or call `atlasjax.tune.tune` where yours is registered."
            )
    return command
