"""Limits of a request to a server."""

import dataclasses

from atlasjax import check


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
      max_tokens: most tokens of an answer, and its default for chats.
      seconds: most time for an answer, waiting included.
      body_bytes: largest body of a request.

    Raises:
      ValueError: a number is out of range.
    """

    max_tokens: int = 1024
    seconds: float = 300.0
    body_bytes: int = 2**20

    def __post_init__(self) -> None:
        check.integer("limits", "max_tokens", self.max_tokens)
        check.number("limits", "seconds", self.seconds, above=0)
        check.integer("limits", "body_bytes", self.body_bytes)
