"""Options of `atlasjax export`."""

import dataclasses
from collections.abc import Sequence

import tyro

from atlasjax.cli.parsing import parse
from atlasjax.train.saving.runs import checkpoint_folder


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """Options of `atlasjax export`."""

    path: tyro.conf.Positional[str]
    """Folder to write, which must not exist."""
    run_dir: str
    """Folder of the run."""
    step: int | None = None
    """Step of the checkpoint. None: the newest usable one."""
    ema: bool = False
    """Take the moving average of the parameters (optimizer.ema_decay) instead of the parameters."""
    trust: tuple[str, ...] = ()
    """Modules of your own parts that the run's files may name, such as my_parts."""


def read(arguments: Sequence[str]) -> ExportCommand:
    """Parses and checks the command line. Raises ConfigError, or SystemExit after help."""
    command = parse(ExportCommand, "export", "Writes the model of a run as public weights.", arguments)
    checkpoint_folder(command.run_dir)
    return command
