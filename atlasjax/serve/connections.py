"""Connections to clients that may be slow, silent or hostile: each has a deadline, and there are only so many.

uvicorn has a limit of requests and a time between two of them. It has none for the headers of a request, for a client that does not
read what it is sent, or for connections that have sent no request; these are here.
"""

import asyncio
import http
import json
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from atlasjax.serve.limits import Limits
from atlasjax.serve.protocol import RequestError

BACKLOG = 128  # connections that the system accepts before the server does; asyncio takes as many at once
_OTHER_FILES = 128  # of the process
_CLOSING = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.ERROR, h11.SEND_BODY)


def make_room(connections: int) -> None:
    """Lets this process open files for so many connections.

    Raises:
      ValueError: the system does not allow it.
    """
    needed = connections + BACKLOG + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            most = hard - BACKLOG - _OTHER_FILES
            raise ValueError(f"connections is {connections}; this process may open {hard} files, enough for {most}.")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Connection(H11Protocol):
    """A connection. `check` is called several times a second.

    Args:
      limits: `connections` and `client_seconds`. If there are too many, the one that has waited for the longest time for a request
        makes room; if none waits, the new one is told so.
      others: as uvicorn's.
    """

    transport: asyncio.Transport

    def __init__(self, *, limits: Limits, **others: Any):
        super().__init__(**others)
        self._limits = limits
        self._since = self._moved = time.monotonic()  # when it began to wait for a request, and last took something
        self._last: RequestResponseCycle | None = None
        self._unsent = 0

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        there: Any = [other for other in self.connections if not other.transport.is_closing()]
        if len(there) <= self._limits.connections:
            return
        waiting = [other for other in there if other is not self and other.is_waiting]
        if waiting:
            min(waiting, key=lambda other: other._since).transport.abort()
        else:
            self._refuse(RequestError(503, "all connections are in use.", code="too_many_connections"))

    def resume_writing(self) -> None:
        """The client has read: what it has not read yet may be as much as before, for more was written."""
        self._moved = time.monotonic()
        super().resume_writing()

    def check(self, now: float) -> None:
        """Closes the connection if its client takes too long to send a request or to read the answer."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent:
            self._moved = now
        self._unsent = unsent
        if self.cycle is not self._last or not self.is_waiting:
            self._last, self._since = self.cycle, now
        if now - self._moved > self._limits.client_seconds:
            self.transport.abort()  # to close it would wait for what it does not read
        elif now - self._since > self._limits.client_seconds and not self.transport.is_closing():
            seconds = self._limits.client_seconds
            self._refuse(RequestError(408, f"no request was complete after {seconds:g} s.", code="timeout"))

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is not HTTP. In the middle of an answer there is no place for another one."""
        if self.conn.our_state in _CLOSING:
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _refuse(self, error: RequestError) -> None:
        content = json.dumps(error.body).encode()
        head = (
            f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()
