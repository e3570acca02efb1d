"""A request and its progress, while a `Batcher` serves it."""

import time
from collections.abc import Callable

import numpy as np

from atlasjax.generate import Context, RowSampling, TextStream
from atlasjax.serve.requests import Done, Event, Request
from atlasjax.serve.slots import key_data


class Ticket:
    """A request that was submitted."""

    def __init__(self, request: Request, on_event: Callable[[Event], None], stream: TextStream, start: Context):
        self.request, self.on_event, self._stream = request, on_event, stream
        self._cancelled = False
        self._ends = float("inf") if request.seconds is None else time.monotonic() + request.seconds
        self._key = key_data(request.seed)
        self._sampling = RowSampling.of([request.sampling], start.logits.shape[-1])
        self._slot: int | None = None
        self._context = start  # before the tokens in `_left`; while the text is in the slot, at its last copy
        self._left: list[int] = []
        self._prompt = np.zeros(0, np.int32)
        self._fed = False  # whether the text is in the slot
        self._branch: int | None = None  # tokens of the prompt that it shares with an earlier one
        self._tokens: list[int] = []  # generated
        self._text_length = 0
        self._prompt_end: Context | None = None  # where the context goes on from if a stop string ends the text
        self._done: Done | None = None  # what is said when the text has been read again without the stop string

    def cancel(self) -> None:
        """Gives the slot back before the next step. No event follows. May be called from any thread, and more than once."""
        self._cancelled = True
