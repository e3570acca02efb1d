"""Options of `atlasjax serve`."""

import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

from atlasjax import storage
from atlasjax.cli.parsing import parse
from atlasjax.serve.limits import BatchConfig, Limits, MemoryLimits
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.saving.runs import checkpoint_folder

TOKEN = "ATLASJAX_SERVE_TOKEN"


@dataclasses.dataclass(frozen=True)
class ServeCommand:
    """Options of `atlasjax serve`."""

    run_dir: str = "runs/atlas-tiny"
    """Folder of the run."""
    step: int | None = None
    """Step of the checkpoint. None: the newest usable one."""
    ema: bool = False
    """Take the moving average of the parameters (optimizer.ema_decay) instead of the parameters."""
    trust: tuple[str, ...] = ()
    """Modules of your own parts that the run's files may name, such as my_parts."""
    host: str = "127.0.0.1"
    """Address to listen at. Other than this machine's own only with a token."""
    port: int = 8000
    """0: one that is free."""
    token_file: str | None = None
    """File with the token that clients have to send. None: the variable ATLASJAX_SERVE_TOKEN, or no token."""
    name: str | None = None
    """Name of the model. None: the name of the run's folder."""
    batch: Annotated[BatchConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=BatchConfig)
    limits: Annotated[Limits, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Limits)
    memories: str | None = None
    """Folder of the memories. None: "memories" in the run's folder."""
    keep: MemoryLimits = dataclasses.field(default_factory=MemoryLimits)
    grace_seconds: float = 10.0
    """Time for running requests to end after SIGTERM."""


def read(arguments: Sequence[str]) -> ServeCommand:
    """Parses and checks the command line. Raises ConfigError, or SystemExit after help."""
    command = parse(ServeCommand, "serve", "Serves a trained model over HTTP, in the form of OpenAI's API.", arguments)
    checked(command)
    checkpoint_folder(command.run_dir)
    return command


def checked(command: ServeCommand) -> tuple[str | None, pathlib.Path]:
    """The token and the folder of the memories, after checking everything that needs no model."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} cannot be imported; pip install 'atlasjax[serve]'.")
    if not 0 <= command.port < 2**16:
        raise ConfigError(f"port is {command.port}; it must be in [0, 65535].")
    if not 0 < command.grace_seconds < float("inf"):
        raise ConfigError(f"grace_seconds is {command.grace_seconds}; it must be positive.")
    with user_errors():
        folder = (
            storage.path(command.run_dir) / "memories" if command.memories is None else storage.path(command.memories)
        )
        if not isinstance(folder, pathlib.Path):
            raise ConfigError(f"memories is {str(folder)!r}; give a folder on this machine's disk with --memories.")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        # load_run says that a run is not a folder
        if not there.is_dir() and there.absolute() != pathlib.Path(command.run_dir).absolute():
            raise ConfigError(
                f"memories is {str(folder)!r}, but {str(there)!r} is a file; give a folder with --memories."
            )
        if command.token_file is not None:
            token = pathlib.Path(command.token_file).read_text("utf-8", "replace")
        elif not (token := os.environ.get(TOKEN, "")):
            return None, folder
    if not token.isascii() or len(token.split()) != 1:
        given = f"{TOKEN} is set" if command.token_file is None else f"token_file is {command.token_file!r}"
        raise ConfigError(f"{given}; it should have one word of ASCII characters.")
    return token.strip(), folder
