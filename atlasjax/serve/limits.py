"""Limits of a server's requests and clients."""

import dataclasses

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests and clients.

    Attributes:
      max_tokens: most tokens of an answer, and its default for chats.
      seconds: most time for an answer, waiting included.
      body_bytes: largest body of a request.
      client_seconds: most time that a client may take to send the headers of a request, to send its body, and to read on in what it
        is sent.
      connections: most connections at a time. Of more, the one that has sent no request for the longest time is closed.

    Raises:
      ValueError: a number is out of range.
    """

    max_tokens: int = 1024
    seconds: float = 300.0
    body_bytes: int = 2**20
    client_seconds: float = 30.0
    connections: int = 256

    def __post_init__(self) -> None:
        check.integer("limits", "max_tokens", self.max_tokens)
        check.number("limits", "seconds", self.seconds, above=0)
        check.integer("limits", "body_bytes", self.body_bytes)
        check.number("limits", "client_seconds", self.client_seconds, above=0)
        check.integer("limits", "connections", self.connections)
