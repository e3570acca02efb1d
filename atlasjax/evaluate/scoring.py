"""Log-likelihoods of continuations, and greedy or sampled continuations, of many prompts of unequal length.

    scorer = Scorer(model)
    score = scorer.score([(prompt, answer)])[0].log_likelihood

Prompts are read through the streaming cache in pieces of a few fixed lengths. So a prompt may be as long as one likes, memory does
not grow with it if the cache is bounded, and new lengths compile nothing.
"""

import dataclasses
import itertools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import PyTree
from numpy.typing import ArrayLike

from atlasjax import check
from atlasjax.evaluate.pieces import Reader, filled, shared_beginnings, take
from atlasjax.generate import Context, SamplingConfig, TextStream, stream
from atlasjax.generate.context import array_of, check_tokens
from atlasjax.generate.text import Decodes
from atlasjax.nn import LanguageModel

T = TypeVar("T")

_BLOCK = 16  # tokens sampled per device call
_GREEDY = SamplingConfig(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class Score:
    """A model's likelihood of a continuation.

    Attributes:
      token_log_likelihoods: ln p of each token of the continuation, given all tokens before it; float32 [time] (NumPy).
      is_greedy: whether each token is the most likely one.
    """

    token_log_likelihoods: np.ndarray
    is_greedy: bool

    @property
    def log_likelihood(self) -> float:
        """ln p of the continuation, in nats; summed in float64."""
        return float(self.token_log_likelihoods.sum(dtype=np.float64))


class _Tail(NamedTuple):
    """The part of a pair that is read after the beginning of its context.

    Attributes:
      place: that of its context among those that are read together.
      pair: its index.
      tokens: the end of its context and its continuation, int32 [time].
    """

    place: int
    pair: int
    tokens: np.ndarray


class Scorer:
    """Reads prompts with a model, a batch at a time.

    Every call on the device has `batch_size` rows (with fewer prompts, a power of two) and one of the lengths in `pieces`, so the
    number of compiled programs does not depend on the lengths of the prompts. If a mixer keeps every token, room is made for a
    power of two of them, and there are programs for each. Where learned positions end, a piece may be shorter. Rows of unequal
    length do not change each other's numbers.

    Args:
      model: a `LanguageModel`.
      batch_size: rows read together.
      pieces: numbers of tokens read at a time, in descending order.

    Raises:
      ValueError: a number is not positive, or the pieces are not in descending order.
    """

    def __init__(self, model: LanguageModel, *, batch_size: int = 8, pieces: Sequence[int] = (256, 32)):
        check.integer("Scorer", "batch_size", batch_size)
        descending = bool(pieces) and all(a > b for a, b in itertools.pairwise(pieces))
        if not all(check.is_integer(piece, 1) for piece in pieces) or not descending:
            raise ValueError(f"Scorer: pieces must be positive integers in descending order, got {pieces!r}.")
        self.model, self.batch_size, self.pieces = model, batch_size, tuple(pieces)
        self._reader = Reader(model, batch_size, self.pieces)
        self._smaller: dict[int, Scorer] = {}

    def score(
        self,
        pairs: Sequence[tuple[ArrayLike, ArrayLike]],
        *,
        on_result: Callable[[int, Score], None] = lambda index, score: None,
    ) -> list[Score]:
        """Scores continuations, each given its context. A beginning that contexts share is read once: a context with several
        continuations, and a beginning that more contexts than `batch_size` share (instructions, examples).

        Args:
          pairs: (context, continuation), integers [time ≥ 1] each.
          on_result: called with (index of the pair, its score) as soon as it is known, from the longest context down.

        Returns:
          One `Score` for each pair, in their order.

        Raises:
          ValueError: a row is empty, not of integers or has a token that is not in the vocabulary, or a pair is longer than a model
            with learned positions can read.
        """
        rows = [
            (self._row("context", context), self._row("continuation", continuation)) for context, continuation in pairs
        ]
        for context, continuation in rows:
            self.model.check_length(len(context) + len(continuation) - 1, "context and continuation")
        scorer = self._for(len(rows))
        pairs_of: dict[bytes, list[int]] = {}
        for index, (context, _) in enumerate(rows):
            pairs_of.setdefault(context.tobytes(), []).append(index)
        groups = sorted(pairs_of.values(), key=lambda group: -len(rows[group[0]][0]))
        scores: dict[int, Score] = {}
        # A beginning is read by itself if otherwise more than one batch would read it.
        contexts = [rows[group[0]][0] for group in groups]
        for length, members in shared_beginnings(contexts, scorer.pieces[0], scorer.batch_size + 1):
            plans = [
                scorer._plan(rows, some, length) for some in _batches([groups[i] for i in members], scorer.batch_size)
            ]
            start = None
            if length:
                start = scorer._reader.cache(max(room for _, _, room in plans))
                start = scorer._reader.read([contexts[members[0]][:length]], start)[1]
            for heads, batches, room in plans:
                cache = scorer._reader.cache(room) if start is None else start
                for index, score in scorer._scores(rows, heads, batches, cache):
                    scores[index] = score
                    on_result(index, score)
        return [scores[index] for index in range(len(rows))]

    def read(self, prompts: Sequence[ArrayLike], *, num_tokens: int = 0) -> Context:
        """Reads up to `batch_size` prompts, each exactly to its end.

        Args:
          prompts: integers [time ≥ 1] each.
          num_tokens: number of tokens to be generated, for which room is made.

        Returns:
          A context of `batch_size` rows. Rows after the prompts repeat the last one.

        Raises:
          ValueError: there are no prompts or too many, one is empty, not of integers or has a token that is not in the vocabulary,
            or it is longer than a model with learned positions can read.
        """
        rows = [self._row("prompt", prompt) for prompt in prompts]
        check.require(
            1 <= len(rows) <= self.batch_size, "the number of prompts", len(rows), f"in [1, {self.batch_size}]"
        )
        longest = max(map(len, rows)) + num_tokens
        self.model.check_length(longest, "prompt and num_tokens")
        room = self._reader.room(longest)
        logits, cache = self._reader.read(rows, self._reader.cache(room))
        rows = filled(rows, self.batch_size)
        seen = np.zeros((self.batch_size, self.model.config.vocab_size), bool)
        for known, row in zip(seen, rows, strict=True):
            known[row] = True
        return Context(cache, logits, seen, np.array([len(row) for row in rows], np.int32), room)

    def generate(
        self,
        prompts: Sequence[ArrayLike],
        num_tokens: int | np.integer | Sequence[int],
        tokenizer: Decodes,
        *,
        stop: Sequence[Sequence[str]] = (),
        end_tokens: Sequence[int] = (),
        config: SamplingConfig = _GREEDY,
        seed: int = 0,
        vocab_size: int | None = None,
        on_result: Callable[[int, str], None] = lambda index, text: None,
    ) -> list[str]:
        """Continues prompts. Greedy unless `config` says otherwise.

        Args:
          prompts: integers [time ≥ 1] each.
          num_tokens: most tokens to generate, one number for all prompts or one for each.
          tokenizer: has `decode`.
          stop: for each prompt the strings that end its text; they are not part of it. Empty: none.
          end_tokens: tokens that end a text.
          config: how to sample the tokens.
          seed: the same seed and the same prompts give the same texts.
          vocab_size: tokens of the tokenizer, if it has fewer than the model: others are never sampled.
          on_result: called with (index of the prompt, its text) as soon as it is known, from the longest prompt down.

        Returns:
          The text that follows each prompt.

        Raises:
          ValueError: as for `read`, a stop string is empty, or a number of tokens is not positive.
        """
        rows = [self._row("prompt", prompt) for prompt in prompts]
        most = [num_tokens] * len(rows) if isinstance(num_tokens, int | np.integer) else list(num_tokens)
        stops = list(stop) or [()] * len(rows)
        for name, values in (("num_tokens", most), ("stop", stops)):
            check.require(
                len(values) == len(rows), f"the length of {name}", len(values), f"that of prompts, {len(rows)}"
            )
        for row, number in zip(rows, most):
            check.integer("generate", "num_tokens", number, kinds=numbers.Integral)
            self.model.check_length(len(row) + number, "prompt and num_tokens")
        most = list(map(int, most))
        texts: dict[int, str] = {}
        # Prompts that ask for equally many tokens are neighbours, so that short answers do not wait for long ones.
        order = sorted(range(len(rows)), key=lambda index: (-most[index], -len(rows[index])))
        scorer = self._for(len(rows))
        for batch in scorer._fitting(order, rows, most):
            streams = [TextStream(tokenizer, rows[index], stops[index], end_tokens) for index in batch]
            pieces = scorer._generated([rows[index] for index in batch], [most[index] for index in batch], streams,
                                       config, seed, vocab_size)  # fmt: skip
            for index, text in zip(batch, pieces, strict=True):
                texts[index] = text
                on_result(index, text)
        return [texts[index] for index in range(len(rows))]

    def _for(self, rows: int) -> "Scorer":
        """One whose batches are not larger than a power of two that holds all rows."""
        size = 1 << max(rows - 1, 0).bit_length()
        if size >= self.batch_size:
            return self
        return self._smaller.setdefault(size, Scorer(self.model, batch_size=size, pieces=self.pieces))

    def _fitting(self, order: list[int], rows: list[np.ndarray], most: list[int]) -> Iterator[list[int]]:
        """Batches in which the longest prompt and most tokens together fit a model with learned positions."""
        last, batch, longest, number = self.model.config.max_positions, list[int](), 0, 0
        for index in order:
            longest, number = max(longest, len(rows[index])), max(number, most[index])
            if len(batch) == self.batch_size or (batch and last is not None and longest + number > last):
                yield batch
                batch, longest, number = [], len(rows[index]), most[index]
            batch.append(index)
        if batch:
            yield batch

    def _generated(
        self, rows: list[np.ndarray], most: list[int], streams: list[TextStream], config: SamplingConfig, seed: int,
        vocab_size: int | None,
    ) -> list[str]:  # fmt: skip
        # Whole blocks, so that one program serves all numbers of tokens; learned positions may end before.
        longest, last = max(most), self.model.config.max_positions
        whole = -(-longest // _BLOCK) * _BLOCK
        if last is not None:
            whole = max(longest, min(whole, last - max(map(len, rows))))
        context = self.read(rows, num_tokens=whole)
        blocks = stream(
            self.model, None, whole, config=config, seed=seed, block=_BLOCK, vocab_size=vocab_size, context=context
        )
        texts, ended, done = [""] * len(rows), [False] * len(rows), 0
        for block in blocks:
            for i, tokens in enumerate(np.asarray(block)[: len(rows)]):
                if ended[i]:
                    continue
                texts[i] += streams[i].feed(tokens[: most[i] - done])
                ended[i] = streams[i].stopped or most[i] <= done + _BLOCK
            done += _BLOCK
            if all(ended):
                break
        return [text + rest.finish() for text, rest in zip(texts, streams, strict=True)]

    def _plan(
        self, rows: list[tuple[np.ndarray, np.ndarray]], groups: Sequence[list[int]], length: int
    ) -> tuple[list[np.ndarray], list[tuple[int, list[_Tail]]], int]:
        """How to read pairs, given in up to `batch_size` groups with one context each, all after the same `length` tokens.

        Returns:
          For each group, the part of its context that is read by itself; batches of the parts that are read after it, each with the
          number of tokens of its longest row, padding included; and the room that all of this needs.
        """
        # Before its continuations, whole pieces of a context are read, but not its last token, whose logits are needed.
        ends, tails = [], []
        for place, group in enumerate(groups):
            piece = self.pieces[0 if len(group) == 1 else -1]
            ends.append(max(length, (len(rows[group[0]][0]) - 1) // piece * piece))
            for index in group:
                context, continuation = rows[index]
                tails.append(_Tail(place, index, np.concatenate([context[ends[place] :], continuation])))
        heads = [rows[group[0]][0][length:end] for group, end in zip(groups, ends, strict=True)]
        tails.sort(key=lambda tail: -len(tail.tokens))
        # Padding beyond the room or the learned positions would be NaN, and in the next layer so would the tokens before it.
        last = self.model.config.max_positions
        batches, room = [], 1
        while tails:
            padded = -(-(len(tails[0].tokens) - 1) // self.pieces[-1]) * self.pieces[-1]
            if last is not None:
                padded = min(padded, last - ends[tails[0].place])
            fitting = [tail for tail in tails if last is None or ends[tail.place] + padded <= last][: self.batch_size]
            batches.append((padded, fitting))
            room = max(room, padded + max(ends[tail.place] for tail in fitting))
            taken = {tail.pair for tail in fitting}
            tails = [tail for tail in tails if tail.pair not in taken]
        return heads, batches, self._reader.room(room)

    def _scores(
        self, rows: list[tuple[np.ndarray, np.ndarray]], heads: list[np.ndarray], batches: list[tuple[int, list[_Tail]]],
        start: PyTree,
    ) -> Iterator[tuple[int, Score]]:  # fmt: skip
        """(index, score) of the pairs of a plan. `start` is the cache after what all contexts begin with."""
        cache = self._reader.read(heads, start)[1]
        for length, batch in batches:
            places = filled([tail.place for tail in batch], self.batch_size)
            likelihoods, greedy = self._reader.score([tail.tokens for tail in batch], length, take(cache, places))
            for row, (_, index, tail) in enumerate(batch):
                part = slice(len(tail) - 1 - len(rows[index][1]), len(tail) - 1)
                yield index, Score(likelihoods[row, part], bool(greedy[row, part].all()))

    def _row(self, name: str, row: ArrayLike) -> np.ndarray:
        array = array_of(name, row)
        if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}; it must be integers [time] with at least one token."
            )
        check_tokens(array, self.model.config.vocab_size, name)
        return array.astype(np.int32)


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
