"""Continuous batching: texts of many requests share the steps of a model whose states have a constant size.

    batcher = Batcher(model, tokenizer, BatchConfig(slots=8))
    ticket = batcher.submit(Request(tokens, max_tokens=100), print)
    while batcher.step():
        pass

A request waits for a free slot. Its prompt is read in pieces of a few fixed lengths, no more tokens between two steps of the other
texts than the longest piece has, so that a long prompt does not stop them. A prompt that begins as an earlier one goes on from a
state that was kept (`Prefixes`). What is left of the prompt, fewer tokens than the smallest piece, is read by the
steps that all texts take together. No program depends on the length of a text or on how it is sampled.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable

import numpy as np

from atlasjax import check
from atlasjax.generate import Context, RowSampling, SamplingConfig, TextStream
from atlasjax.generate.context import check_tokens
from atlasjax.nn import LanguageModel
from atlasjax.serve.limits import BatchConfig
from atlasjax.serve.prefixes import Prefixes
from atlasjax.serve.requests import ClosedError, Done, Event, Failed, Piece, QueueFullError, Request, Tokenizes
from atlasjax.serve.slots import SlotRow, Slots, key_data, step_inputs
from atlasjax.serve.tickets import Ticket

_IDLE = SamplingConfig(temperature=0.0)


class Batcher:
    """Serves requests with one model. `submit` may be called from any thread, `step` from one.

    Args:
      model: a `LanguageModel`.
      tokenizer: has `decode` and `vocab_size`.
      config: sizes.
      end_tokens: tokens that end a text. They are not part of its text.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizes, config: BatchConfig = BatchConfig(), *,
        end_tokens: tuple[int, ...] = (),
    ):  # fmt: skip
        self.model, self.config = model, config
        self._tokenizer: Tokenizes = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self.slots = Slots(model, config.slots, config.room, tokenizer.vocab_size)
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._reading: list[Ticket] = []
        self._shortest_first = False
        self._in_slot: list[Ticket | None] = [None] * config.slots
        self._changed = threading.Condition()
        self._prefixes = Prefixes(config.prefix_gigabytes * 1e9)
        self._idle_key, self._idle = key_data(0), RowSampling.of([_IDLE], model.config.vocab_size)
        self._closed: str | None = None

    @property
    def longest(self) -> int | None:
        """Most tokens of a text, with its context; None if there is no limit."""
        limits = [self.config.room if self.slots.keeps_tokens else None, self.model.config.max_positions]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def num_active(self) -> int:
        """Number of requests that have a slot."""
        return sum(ticket is not None for ticket in self._in_slot)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for one."""
        return len(self._waiting)

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> Ticket:
        """Queues a request.

        Args:
          request: what to generate.
          on_event: called by `step` with each `Piece` of text, and at last with `Done` or `Failed`. It should return quickly.

        Raises:
          TypeError: the tokens are an array that would be read as another one.
          ValueError: the request has nothing to read, a number is out of range, a token is not in the vocabulary, or the text would
            be too long.
          QueueFullError: too many requests are waiting.
          ClosedError: the batcher has stopped.
        """
        prompt, context = np.asarray(request.tokens), request.context
        check.plain_array("Request", "tokens", request.tokens)
        check.integer("Request", "max_tokens", request.max_tokens, 0)
        is_seed = type(request.seed) is int and -(2**63) <= request.seed < 2**64
        check.require(is_seed, "seed", request.seed, "an integer in [-2^63, 2^64)")
        if prompt.ndim != 1 or (prompt.size and not np.issubdtype(prompt.dtype, np.integer)):
            raise ValueError(f"tokens is {prompt.dtype} {list(prompt.shape)}; it must be integers [time].")
        check_tokens(prompt, self.model.config.vocab_size, "tokens")
        if not prompt.size and context is None:
            raise ValueError("the prompt is empty; it should have at least one token.")
        start = self.slots.no_text if context is None else self.slots.fitted(context)
        length = int(start.num_tokens[0]) + len(prompt) + request.max_tokens
        if self.longest is not None and length > self.longest:
            raise ValueError(
                f"the text has {length} tokens, {request.max_tokens} of them to be generated; "
                f"it should have at most {self.longest}."
            )
        seen = start.seen.copy()
        seen[0, prompt.astype(int)] = True
        ticket = Ticket(
            request, on_event, TextStream(self._tokenizer, prompt.tolist(), request.stop),
            dataclasses.replace(start, seen=seen),
        )  # fmt: skip
        ticket._left, ticket._prompt = prompt.tolist(), prompt.astype(np.int32)
        with self._changed:
            if self._closed is not None:
                raise ClosedError(self._closed)
            # Both together: a waiting request that is about to get a slot must not count twice.
            if self.num_active + len(self._waiting) >= self.config.slots + self.config.queue:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting; try again later.")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def wait(self, seconds: float) -> None:
        """Returns when there is something to do, or after this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.num_active, seconds)

    def wake(self) -> None:
        """Ends a `wait` of another thread."""
        with self._changed:
            self._changed.notify_all()

    def step(self) -> bool:
        """Reads pieces of prompts, and takes one step of all texts. Returns whether there is more to do."""
        # Before new texts are admitted, so that a slot that has become free is used in the same step.
        self._leave()
        self._admit()
        self._read_pieces()
        if any(ticket is not None and ticket._fed for ticket in self._in_slot):
            self._step()
        return bool(self._waiting) or self.num_active > 0

    def close(self, message: str) -> None:
        """Ends all requests, as failed, and takes no more. Called by the thread that calls `step`."""
        with self._changed:
            self._closed = message
            tickets = [ticket for ticket in self._in_slot if ticket is not None] + list(self._waiting)
            self._waiting.clear()
        self._reading.clear()
        self._in_slot = [None] * self.config.slots
        for ticket in tickets:
            ticket.on_event(Failed(False, message))

    def warm_up(self, report: Callable[[str], None] = lambda doing: None) -> None:
        """Compiles all programs. report: is told what is being compiled."""
        report(f"compiling how prompts are read, in pieces of {', '.join(map(str, self.config.pieces))} tokens")
        request = Request(np.zeros(sum(self.config.pieces) + 1, np.int32), 1, stop=("never found",), keep=True)
        if self.longest is not None and len(request.tokens) + 1 > self.longest:
            request = dataclasses.replace(request, tokens=request.tokens[: self.longest - 1])
        # A request that uses every program: each piece once, a context at the end of the prompt, and one at the end of the text.
        self.submit(request, lambda event: None)
        while self.step():
            pass
        self._prefixes.clear()
        self.slots.compile(step_inputs([self._row(None)] * self.config.slots), report)

    def _leave(self) -> None:
        """Takes out requests that were cancelled, and those whose time is over."""
        now = time.monotonic()
        with self._changed:
            over = [ticket for ticket in self._waiting if ticket._cancelled or ticket._ends <= now]
            for ticket in over:
                self._waiting.remove(ticket)
        for there in self._in_slot:
            if there is not None and (there._cancelled or (there._ends <= now and there._done is None)):
                over.append(there)
        for ticket in over:
            if ticket._tokens and not ticket._cancelled:
                self._end(ticket, "length")
                continue
            self._free(ticket)
            if not ticket._cancelled:
                ticket.on_event(Failed(True, f"the time of {ticket.request.seconds:g} s ended before the first token."))

    def _free(self, ticket: Ticket) -> None:
        if ticket._slot is not None:
            self._in_slot[ticket._slot] = None
            if ticket in self._reading:
                self._reading.remove(ticket)

    def _admit(self) -> None:
        for slot, there in enumerate(self._in_slot):
            if there is None:
                with self._changed:
                    if not self._waiting:
                        return
                    ticket = self._waiting.popleft()
                    ticket._slot, self._in_slot[slot] = slot, ticket
                self._reading.append(ticket)

    def _read_pieces(self) -> None:
        """Reads prompts, together no more tokens than the longest piece has: one after the other, so that what waits for its first
        token waits for few others, but the shortest first in every other piece, so that it does not wait for a long one."""
        most = self.config.pieces[0]
        while self._reading and most:
            lengths = [len(ticket._left) for ticket in self._reading]
            place = lengths.index(min(lengths)) if self._shortest_first else 0
            ticket = self._reading.pop(place)
            read = self._read_piece(ticket, most)
            if not ticket._fed:
                self._reading.insert(place, ticket)
                if not read:
                    return
            most -= read
            self._shortest_first = not self._shortest_first if read else self._shortest_first

    def _read_piece(self, ticket: Ticket, most: int) -> int:
        """Reads the next piece, if it has at most so many tokens. If fewer tokens are left than the smallest piece has,
        puts the text into its slot. Returns the number of tokens that were read.
        """
        # What was generated, and what follows a context, is no beginning of a prompt.
        tokens = ticket._prompt if ticket.request.context is None and ticket._done is None else None
        end = self._go_on(ticket, tokens) if tokens is not None else len(ticket._left)
        left, context = ticket._left, ticket._context
        piece = next((piece for piece in self.config.pieces if piece <= end), 0)
        if piece > most:
            return 0
        if piece:
            logits, cache = self.slots.read(np.array(left[:piece], np.int32), context.cache)
            left = ticket._left = left[piece:]
            ticket._context = dataclasses.replace(
                context, logits=logits, cache=cache, num_tokens=context.num_tokens + np.int32(piece)
            )
            if tokens is not None and (piece == end or len(left) < self.config.pieces[-1]):
                self._prefixes.keep(tokens[: len(tokens) - len(left)], ticket._context)
        if len(left) < self.config.pieces[-1]:
            assert ticket._slot is not None
            self.slots.put(ticket._slot, ticket._context)
            # The rest of the prompt, shorter than the smallest piece, is read token by token in the common step.
            ticket._fed = True
            if not ticket._left:
                self._all_read(ticket)
        return piece

    def _go_on(self, ticket: Ticket, tokens: np.ndarray) -> int:
        """Takes the place of what another prompt has read since. Returns how many tokens to read until the prompt is over, or is no
        longer the same as an earlier one."""
        if ticket._branch is None:
            ticket._branch = self._prefixes.shared(tokens)
        at = len(tokens) - len(ticket._left)
        if (found := self._prefixes.longest(tokens, at)) is not None:
            ticket._context = dataclasses.replace(found, seen=ticket._context.seen)
            at = int(found.num_tokens[0])
            ticket._left = ticket._left[at - len(tokens) :] if at < len(tokens) else []
        before = (ticket._branch - at) // self.config.pieces[-1] * self.config.pieces[-1]
        return before if before > 0 else len(ticket._left)

    def _all_read(self, ticket: Ticket) -> None:
        """After the last token of a prompt, or of a text that is read again."""
        if ticket._done is not None:
            self._say_done(ticket, ticket._done)
        elif not ticket.request.max_tokens:
            self._end(ticket, "length")
        elif ticket.request.keep and ticket.request.stop:
            ticket._prompt_end = self._context(ticket)

    def _close_ranks(self) -> None:
        """Moves texts to the first slots if a step then takes fewer."""
        used = [slot for slot, ticket in enumerate(self._in_slot) if ticket is not None]
        while self.slots.size_for(len(used)) < self.slots.size_for(used[-1] + 1):
            last, free = used.pop(), self._in_slot.index(None)
            ticket = self._in_slot[last]
            assert ticket is not None
            if ticket._fed:
                self.slots.move(last, free)
            ticket._slot, self._in_slot[free], self._in_slot[last] = free, ticket, None
            used = sorted([*used, free])

    def _step(self) -> None:
        self._close_ranks()
        active = [ticket if ticket is not None and ticket._fed else None for ticket in self._in_slot]
        last = max(slot for slot, ticket in enumerate(active) if ticket is not None)
        active = active[: self.slots.size_for(last + 1)]
        tokens = self.slots.step(step_inputs([self._row(ticket) for ticket in active]))
        for ticket, token in zip(active, tokens.tolist(), strict=True):
            if ticket is None:
                continue
            if ticket._left:
                ticket._left = ticket._left[1:]
                ticket._context = dataclasses.replace(
                    ticket._context, num_tokens=ticket._context.num_tokens + np.int32(1)
                )
                if not ticket._left:
                    self._all_read(ticket)
            else:
                self._sampled(ticket, token)

    def _row(self, ticket: Ticket | None) -> SlotRow:
        """The inputs of a slot for a step, see `step_inputs`. None: it has no text."""
        if ticket is None:
            return -1, 0, self._idle_key, self._idle
        forced, sampling = (ticket._left[0], self._idle) if ticket._left else (-1, ticket._sampling)
        return forced, len(ticket._tokens), ticket._key, sampling

    def _sampled(self, ticket: Ticket, token: int) -> None:
        ticket._tokens.append(token)
        if token in self.end_tokens:
            self._end(ticket, "stop")
            return
        self._say(ticket, ticket._stream.feed([token]))
        if ticket._stream.stopped:
            self._end(ticket, "stop")
        elif len(ticket._tokens) >= ticket.request.max_tokens:
            self._end(ticket, "length")

    def _say(self, ticket: Ticket, text: str) -> None:
        ticket._text_length += len(text)
        if text:
            ticket.on_event(Piece(text))

    def _end(self, ticket: Ticket, reason: str) -> None:
        stopped = ticket._stream.stopped
        if not stopped:
            self._say(ticket, ticket._stream.finish())
            stopped = ticket._stream.stopped
        done = Done("stop" if stopped else reason, tuple(ticket._tokens))
        if not (ticket.request.keep and stopped):
            self._say_done(ticket, done)
            return
        # The state has the stop string already: the tokens of the text are read again, after the prompt.
        assert ticket._prompt_end is not None
        # A memory cannot be set back by a token; only the context at the prompt's end can be gone on from.
        kept = self._tokens_of_text(ticket)
        seen = ticket._prompt_end.seen.copy()
        seen[0, kept] = True
        ticket._context, ticket._left = dataclasses.replace(ticket._prompt_end, seen=seen), kept
        ticket._done, ticket._fed = done, False
        self._reading.append(ticket)

    def _tokens_of_text(self, ticket: Ticket) -> list[int]:
        """The generated tokens that are wholly before the stop string."""
        before = ticket.request.tokens.tolist()
        text, length, kept = TextStream(self._tokenizer, before), 0, 0
        for number, token in enumerate(ticket._tokens):
            new = len(text.feed([token]))
            length += new
            if length > ticket._text_length:
                break
            if new:  # not the first bytes of a character of the stop string
                kept = number + 1
        return ticket._tokens[:kept]

    def _say_done(self, ticket: Ticket, done: Done) -> None:
        context = self._context(ticket) if ticket.request.keep else None
        self._free(ticket)
        ticket.on_event(dataclasses.replace(done, context=context))

    def _context(self, ticket: Ticket) -> Context:
        """The context of a text in its slot."""
        assert ticket._slot is not None
        sampled = 0 if ticket._done is not None else len(ticket._tokens)
        return self.slots.take(ticket._slot, int(ticket._context.num_tokens[0]) + sampled)


class Worker:
    """A thread that serves the requests of a `Batcher`, until it is closed.

    Attributes:
      error: what ended it before, or None. All requests have failed then.
    """

    def __init__(self, batcher: Batcher):
        self.batcher = batcher
        self.error: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atlasjax-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its step. Requests that are left fail."""
        self._closed.set()
        self.batcher.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                if not self.batcher.step():
                    self.batcher.wait(1.0)
            self.batcher.close("the server was stopped.")
        except Exception as error:  # whatever it is, nobody may wait for an answer
            self.error = f"{type(error).__name__}: {error}"
            self.batcher.close("the server failed; its log says why.")
            raise
