"""Options of `atlasjax prepare`."""

import dataclasses
from collections.abc import Sequence

from atlasjax.cli.parsing import parse
from atlasjax.data.config import DataConfig
from atlasjax.data.manifest import SHARD_TOKENS
from atlasjax.train.errors import ConfigError

_DESCRIPTION = """Tokenizes a corpus once, shuffles its documents, and writes them to --out. To train on it:
atlasjax train --data.source prepared --data.paths OUT

When it is stopped, the same command goes on. The result does not depend on the number of workers."""


@dataclasses.dataclass(frozen=True)
class PrepareCommand:
    """Options of `atlasjax prepare`."""

    out: str = "prepared"
    """Folder to write to, new or empty, or one in which the same preparation was stopped. May be a URL on gs://."""
    workers: int | None = None
    """Processes that tokenize. None: one for each core that this process may use."""
    shard_tokens: int = SHARD_TOKENS
    """About as many tokens come into one file."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)


def read(arguments: Sequence[str]) -> PrepareCommand:
    """Parses the command line. Raises ConfigError, or SystemExit after help."""
    command = parse(PrepareCommand, "prepare", _DESCRIPTION, arguments)
    if command.workers is not None and command.workers < 1:
        raise ConfigError(f"workers is {command.workers}; it should be at least 1.")
    return command
