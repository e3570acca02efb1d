"""Limits of a server's requests and clients."""

import dataclasses
import itertools

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
      connections: most connections at a time. If there are more, the one that has sent no request for the longest time is closed.

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


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Sizes of a `Batcher`.

    Attributes:
      slots: number of texts that are generated at the same time.
      queue: most requests that wait for a slot.
      room: most tokens of a text, if a mixer of the model keeps every token. It has no effect on states of constant size.
      pieces: numbers of prompt tokens that are read at a time, in descending order.
      prefix_gigabytes: most 10^9 bytes of states after common beginnings of prompts. 0: none are kept.

    Raises:
      ValueError: a number is out of range, or the pieces are not in descending order.
    """

    slots: int = 8
    queue: int = 64
    room: int = 4096
    pieces: tuple[int, ...] = (256, 32, 4)
    prefix_gigabytes: float = 0.25

    def __post_init__(self) -> None:
        for name, least in {"slots": 1, "queue": 0, "room": 1}.items():
            value = getattr(self, name)
            check.require(check.is_integer(value, least), name, value, f"an integer, at least {least}")
        right = bool(self.pieces) and all(check.is_integer(piece, 1) for piece in self.pieces)
        right = right and all(a > b for a, b in itertools.pairwise(self.pieces))
        check.number("BatchConfig", "prefix_gigabytes", self.prefix_gigabytes, least=0)
        check.require(right, "pieces", self.pieces, "positive integers in descending order")


@dataclasses.dataclass(frozen=True)
class MemoryLimits:
    """How long memories are kept, and how many.

    Attributes:
      hours: one that was not used for so long is removed.
      count: if there are more, those that were not used for the longest time are removed.
      gigabytes: the same for more than so many 10^9 bytes.

    Raises:
      ValueError: a number is out of range.
    """

    hours: float = 24.0 * 7
    count: int = 1000
    gigabytes: float = 10.0

    def __post_init__(self) -> None:
        check.number("memories", "hours", self.hours, above=0)
        check.integer("memories", "count", self.count)
        check.number("memories", "gigabytes", self.gigabytes, above=0)
