"""Options of `atlasjax prepare`."""

import dataclasses
import importlib.util
from collections.abc import Sequence

import tyro

from atlasjax.cli.parsing import parse
from atlasjax.data.config import DataConfig
from atlasjax.data.manifest import SHARD_TOKENS
from atlasjax.train.errors import ConfigError

_DESCRIPTION = """Tokenizes a corpus once, shuffles its documents, and writes them to --out. To train on it:
atlasjax train --data.source prepared --data.paths OUT

When it is stopped, the same command goes on. The result does not depend on the number of workers, nor on where they are."""


@dataclasses.dataclass(frozen=True)
class PrepareCommand:
    """Options of `atlasjax prepare`."""

    out: str = "prepared"
    """Folder to write to, new or empty, or one in which the same preparation was stopped. May be a URL on gs://."""
    workers: int | None = None
    """Processes that tokenize. None: one for each core that this process may use."""
    shard_tokens: int = SHARD_TOKENS
    """About as many tokens come into one file."""
    runner: str | None = None
    """Runner of Apache Beam that works on many machines, such as DataflowRunner, SparkRunner or FlinkRunner; its own options
    follow a double hyphen at the end. None: processes of this machine."""
    beam: tyro.conf.Suppress[tuple[str, ...]] = ()
    data: DataConfig = dataclasses.field(default_factory=DataConfig)


def read(arguments: Sequence[str]) -> PrepareCommand:
    """Parses the command line. Raises ConfigError, or SystemExit after help."""
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    command = parse(PrepareCommand, "prepare", _DESCRIPTION, given[:cut])
    if command.workers is not None and command.workers < 1:
        raise ConfigError(f"workers is {command.workers}; it must be at least 1.")
    beam = tuple(given[cut + 1 :])
    if command.runner is None:
        if beam:
            raise ConfigError(f"{beam[0]} after -- is an option of Beam; it needs --runner.")
        return command
    if command.workers is not None:
        raise ConfigError(
            f"--workers is for processes of this machine; {command.runner} takes its own options, after --."
        )
    if importlib.util.find_spec("apache_beam") is None:
        raise ConfigError(f"--runner {command.runner} needs Apache Beam: pip install 'atlasjax[beam]'.")
    return dataclasses.replace(command, beam=(f"--runner={command.runner}", *beam))
