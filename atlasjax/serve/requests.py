"""Requests to a `Batcher`, and the events with which it answers."""

import dataclasses
from typing import Protocol

import numpy as np

from atlasjax.generate import Context, SamplingConfig
from atlasjax.generate.text import Decodes


class Tokenizes(Decodes, Protocol):
    """The methods of a tokenizer that the server needs."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, /) -> np.ndarray:
        """The token ids of a text, integers [num_tokens]. Names of control tokens in it are text."""
        ...

    def guarded(self, content: str, /) -> str:
        """A text that is part of another, marked so that no name of a control token in it is read as one.

        Raises:
          ValueError: it has the character of the mark.
        """
        ...

    def encode_controlled(self, text: str, /) -> np.ndarray:
        """The token ids of a text in which names of control tokens are these tokens, except in `guarded` parts."""
        ...


@dataclasses.dataclass(frozen=True)
class Request:
    """A text to continue.

    Attributes:
      tokens: the prompt, integers [time]. It may be empty after a context.
      max_tokens: most tokens to generate. 0 only reads the prompt.
      sampling: how to sample them.
      seed: the same prompt and seed give the tokens of `generate`, whatever else is generated at the same time. Seeds beyond
        [0, 2^32), which `generate` does not have, may be in [-2^63, 2^64); negative ones count modulo 2^64.
      stop: strings that end the text; they are not part of it.
      context: text that was read before the prompt.
      keep: whether the result has the context after the text. It has the prompt and the tokens of the text: of a stop string that
        ended the text, nothing.
      seconds: the text ends after this time, waiting included. None: no limit.
    """

    tokens: np.ndarray
    max_tokens: int
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0
    stop: tuple[str, ...] = ()
    context: Context | None = None
    keep: bool = False
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of a request."""

    text: str


@dataclasses.dataclass(frozen=True)
class Done:
    """The last event of a request that was served.

    Attributes:
      reason: "stop" after a stop string or an end token, "length" after most tokens or all its time.
      tokens: the generated tokens, end token and stop string included.
      context: after the text, if it was to be kept.
    """

    reason: str
    tokens: tuple[int, ...]
    context: Context | None = None


@dataclasses.dataclass(frozen=True)
class Failed:
    """The last event of a request that was not served.

    Attributes:
      timed_out: whether its time was over before the first token.
      message: what happened.
    """

    timed_out: bool
    message: str


Event = Piece | Done | Failed


class QueueFullError(RuntimeError):
    """So many requests wait that another one is refused."""


class ClosedError(RuntimeError):
    """The batcher has stopped, and serves no more requests."""
