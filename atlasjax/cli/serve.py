"""`atlasjax serve`."""

import dataclasses
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from atlasjax import storage
from atlasjax.cli.parsing import parse
from atlasjax.generate import ContextFiles
from atlasjax.interop.text_ends import text_ends
from atlasjax.serve import BatchConfig, Batcher, Worker
from atlasjax.serve.chat import Chat, chat_of
from atlasjax.serve.limits import Limits
from atlasjax.serve.memories import Lease, Memories, MemoryLimits
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.load import load_run

_TOKEN = "ATLASJAX_SERVE_TOKEN"


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
    """Name of the model. None: that of the run's folder."""
    batch: Annotated[BatchConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=BatchConfig)
    limits: Annotated[Limits, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Limits)
    memories: str | None = None
    """Folder of the memories. None: "memories" in the run's folder."""
    keep: MemoryLimits = dataclasses.field(default_factory=MemoryLimits)
    grace_seconds: float = 10.0
    """Time for running requests to end after SIGTERM."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    command = parse(ServeCommand, "serve", "Serves a trained model over HTTP, in the form of OpenAI's API.", arguments)
    token, folder = _checked(command)
    from atlasjax.serve.app import Access, Service
    from atlasjax.serve.connections import make_room
    from atlasjax.serve.loading import answering
    from atlasjax.serve.server import Address, Server, listen

    address = Address(command.host, command.port)
    if token is None and not address.is_local:
        raise ConfigError(
            f"host is {command.host!r}, which others reach; give a token with --token-file or {_TOKEN}, or leave the host."
        )
    with user_errors():
        make_room(command.limits.connections)
        lease = Lease.of(folder) if folder.is_dir() else None  # before a model is loaded for nothing
    opened, address = listen(address)
    hosts = frozenset({"localhost", "127.0.0.1", "::1", command.host}) if address.is_local else None
    with answering(opened, address.url, Access(token, hosts), command.limits) as report:
        loaded = load_run(command.run_dir, command.step, ema=command.ema, decodes=True)
        for step, reason in loaded.skipped:
            print(f"atlasjax: the checkpoint of step {step} is unusable: {reason}", file=sys.stderr)
        chat, end_tokens = _conversation(command)
        with user_errors():
            chat.check(loaded.tokenizer)
            batcher = Batcher(loaded.model, loaded.tokenizer, command.batch, end_tokens=end_tokens)
            num_bytes = batcher.slots.no_text.num_bytes
            if num_bytes > command.keep.gigabytes * 1e9:
                raise ConfigError(f"keep.gigabytes is {command.keep.gigabytes}; one memory has {num_bytes:,} bytes.")
            memories = Memories(ContextFiles(loaded.model), folder, command.keep)
        del lease  # the memories have it
        batcher.warm_up(report)
    name = command.name or pathlib.Path(command.run_dir).absolute().name
    service = Service(Worker(batcher), loaded.tokenizer, name, chat, memories, command.limits, token, hosts)
    said = f"serving {name} at {address.url}/v1: {command.batch.slots} texts at a time, {num_bytes:,} bytes each"
    Server(service, grace_seconds=command.grace_seconds, ready=lambda: print(said, flush=True)).run([opened])


def _checked(command: ServeCommand) -> tuple[str | None, pathlib.Path]:
    """The token and the folder of the memories, after checking everything that needs no model."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} cannot be imported; pip install 'atlasjax[serve]'.")
    if not 0 <= command.port < 2**16:
        raise ConfigError(f"port is {command.port}; it should be in [0, 65535].")
    if not 0 < command.grace_seconds < float("inf"):
        raise ConfigError(f"grace_seconds is {command.grace_seconds}; it should be positive.")
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
        elif not (token := os.environ.get(_TOKEN, "")):
            return None, folder
    if not token.isascii() or len(token.split()) != 1:
        given = f"{_TOKEN} is set" if command.token_file is None else f"token_file is {command.token_file!r}"
        raise ConfigError(f"{given}; it should have one word of ASCII characters.")
    return token.strip(), folder


def _conversation(command: ServeCommand) -> tuple[Chat, tuple[int, ...]]:
    run_dir = storage.path(command.run_dir)
    with user_errors():
        try:
            return chat_of(run_dir), text_ends(run_dir).ends
        except ImportError as error:
            raise ConfigError(f"the run has a chat template; pip install 'atlasjax[serve]' ({error}).") from None
