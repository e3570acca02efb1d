"""`atlasjax serve`."""

import pathlib
import sys

from atlasjax import storage
from atlasjax.cli.options.serve import TOKEN, ServeCommand, checked
from atlasjax.generate import ContextFiles
from atlasjax.interop.text_ends import text_ends
from atlasjax.serve import Batcher, Worker
from atlasjax.serve.app import Access, Service
from atlasjax.serve.chat import Chat, chat_of
from atlasjax.serve.connections import make_room
from atlasjax.serve.loading import answering
from atlasjax.serve.memories import Lease, Memories
from atlasjax.serve.server import Address, Server, listen
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.load import load_run


def run(command: ServeCommand) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    token, folder = checked(command)
    address = Address(command.host, command.port)
    if token is None and not address.is_local:
        raise ConfigError(
            f"host is {command.host!r}, which others reach; give a token with --token-file or {TOKEN}, or leave the host."
        )
    with user_errors():
        make_room(command.limits.connections)
        lease = Lease.of(folder) if folder.is_dir() else None  # before a model is loaded for nothing
    opened, address = listen(address)
    hosts = frozenset({"localhost", "127.0.0.1", "::1", command.host}) if address.is_local else None
    access = Access(token, hosts)
    with answering(opened, address.url, access, command.limits) as report:
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
    service = Service(Worker(batcher), loaded.tokenizer, name, chat, memories, command.limits, access)
    said = f"serving {name} at {address.url}/v1: {command.batch.slots} texts at a time, {num_bytes:,} bytes each"
    Server(service, grace_seconds=command.grace_seconds, ready=lambda: print(said, flush=True)).run([opened])


def _conversation(command: ServeCommand) -> tuple[Chat, tuple[int, ...]]:
    run_dir = storage.path(command.run_dir)
    with user_errors():
        try:
            return chat_of(run_dir), text_ends(run_dir).ends
        except ImportError as error:
            raise ConfigError(f"the run has a chat template; pip install 'atlasjax[serve]' ({error}).") from None
