"""Runs the HTTP server of a model, until a signal stops it."""

import asyncio
import dataclasses
import functools
import ipaddress
import math
import socket
import sys
import time
from collections.abc import Callable
from typing import Literal

import uvicorn
from starlette.applications import Starlette

from atlasjax.serve.app import Service, make_app
from atlasjax.serve.connections import BACKLOG, Connection
from atlasjax.serve.limits import Limits

_LAST_SECONDS = 5  # after the grace time, for what clients are told then


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url(self) -> str:
        """The address as a client writes it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A socket at an address, and the address with the port that it got if 0 was asked for.

    Raises:
      OSError: the address cannot be used; the message names it.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, number, _, place = found[0]
        opened = socket.socket(family, kind, number)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(place)
            opened.listen(BACKLOG)
        except OSError:
            opened.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen at {address.url}: {error.strerror or error}.") from None
    return opened, dataclasses.replace(address, port=opened.getsockname()[1])


class HttpServer(uvicorn.Server):
    """Serves an application to `limits.connections` clients at most, which may not be slower than `limits.client_seconds`."""

    def __init__(self, app: Starlette, limits: Limits, *, grace_seconds: float, lifespan: Literal["on", "off"] = "on"):
        # Without uvicorn's handlers: they hold the stderr of the moment they are made in, which may be closed when they write.
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, ws="none", lifespan=lifespan, backlog=BACKLOG,
            server_header=False,
            http=functools.partial(Connection, limits=limits),  # type: ignore[arg-type]
            timeout_graceful_shutdown=math.ceil(grace_seconds),
        )  # fmt: skip
        super().__init__(config)

    async def on_tick(self, counter: int) -> bool:
        """Called by `run`, ten times a second."""
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            connection.check(now)  # type: ignore[union-attr]
        return await super().on_tick(counter)


class Server(HttpServer):
    """Serves until SIGINT or SIGTERM: then nothing new is accepted, and running requests have `grace_seconds` to end.

    Requests that are left then end with an error that says so. Memories are saved when a request ends, so those of all answered
    requests are on the disk.
    """

    def __init__(self, service: Service, *, grace_seconds: float, ready: Callable[[], None] = lambda: None):
        self._service, self._grace_seconds, self._ready = service, grace_seconds, ready
        super().__init__(make_app(service), service.limits, grace_seconds=grace_seconds + _LAST_SECONDS)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves at sockets of `listen`, until the server is stopped."""
        try:
            super().run(sockets)
        except KeyboardInterrupt:  # uvicorn raises the signal again when it has ended
            print("atlasjax: stopped; the memories of all answered requests are saved.", file=sys.stderr)
        finally:
            self._service.worker.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by `run`."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by `run`. uvicorn would end requests that are left without a word to their clients."""

        async def end_requests() -> None:
            await asyncio.sleep(self._grace_seconds)
            await asyncio.to_thread(self._service.worker.close)

        ending = asyncio.create_task(end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
