"""Log-likelihoods of continuations, and greedy or sampled continuations, of many prompts of unequal length.

    scorer = Scorer(model)
    score = scorer.score([(prompt, answer)])[0].log_likelihood

Prompts are read through the streaming cache in pieces of a few fixed lengths. So a prompt may be as long as one likes, memory does
not grow with it if the cache is bounded, and new lengths compile nothing.
"""

import dataclasses
import functools
import itertools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import PyTree
from numpy.typing import ArrayLike

from atlasjax import check
from atlasjax.evaluate.beginnings import shared_beginnings
from atlasjax.generate import Context, SamplingConfig, TextStream, stream
from atlasjax.generate.context import array_of, check_tokens
from atlasjax.generate.text import Decodes
from atlasjax.nn import LanguageModel

T = TypeVar("T")

_BLOCK = 16  # tokens sampled per device call
_GREEDY = SamplingConfig(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class Score:
    """What a model says of a continuation.

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
    """What is read of a pair after the beginning of its context.

    Attributes:
      slot: the place of its context among those that are read together.
      pair: its index.
      tokens: the end of its context and its continuation, int32 [time].
    """

    slot: int
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
        self._graphdef, self._params = nnx.split(model, nnx.Param)
        self._empty: tuple[int, PyTree] | None = None
        self._smaller: dict[int, Scorer] = {}

    def score(
        self,
        pairs: Sequence[tuple[ArrayLike, ArrayLike]],
        *,
        on_result: Callable[[int, Score], None] = lambda index, score: None,
    ) -> list[Score]:
        """Scores continuations, each given its context. What contexts have in common is read once: a context with several
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
        reader = self._for(len(rows))
        pairs_of: dict[bytes, list[int]] = {}
        for index, (context, _) in enumerate(rows):
            pairs_of.setdefault(context.tobytes(), []).append(index)
        groups = sorted(pairs_of.values(), key=lambda group: -len(rows[group[0]][0]))
        scores: dict[int, Score] = {}
        # A beginning is read by itself if otherwise more than one batch would read it.
        contexts = [rows[group[0]][0] for group in groups]
        for length, members in shared_beginnings(contexts, reader.pieces[0], reader.batch_size + 1):
            plans = [
                reader._plan(rows, some, length) for some in _batches([groups[i] for i in members], reader.batch_size)
            ]
            start = None
            if length:
                start = reader._cache(max(room for _, _, room in plans))
                start = reader._read([contexts[members[0]][:length]], start)[1]
            for heads, batches, room in plans:
                cache = reader._cache(room) if start is None else start
                for index, score in reader._scores(rows, heads, batches, cache):
                    scores[index] = score
                    on_result(index, score)
        return [scores[index] for index in range(len(rows))]

    def read(self, prompts: Sequence[ArrayLike], *, num_tokens: int = 0) -> Context:
        """Reads up to `batch_size` prompts, each exactly to its end.

        Args:
          prompts: integers [time ≥ 1] each.
          num_tokens: number of tokens to be generated, for which room is made.

        Returns:
          A context of `batch_size` rows. Those after the prompts repeat the last one.

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
        room = self._room(longest)
        logits, cache = self._read(rows, self._cache(room))
        rows = _filled(rows, self.batch_size)
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
        reader = self._for(len(rows))
        for batch in reader._fitting(order, rows, most):
            streams = [TextStream(tokenizer, rows[index], stops[index], end_tokens) for index in batch]
            pieces = reader._generated([rows[index] for index in batch], [most[index] for index in batch], streams,
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
          Of each group, what is read of its context by itself; batches of what is read after that, each with the number of tokens
          of its longest row, padding included; and the room that all of this needs.
        """
        # What is read of a context before its continuations: whole pieces, and not its last token, whose logits are needed.
        ends, tails = [], []
        for slot, group in enumerate(groups):
            piece = self.pieces[0 if len(group) == 1 else -1]
            ends.append(max(length, (len(rows[group[0]][0]) - 1) // piece * piece))
            for index in group:
                context, continuation = rows[index]
                tails.append(_Tail(slot, index, np.concatenate([context[ends[slot] :], continuation])))
        heads = [rows[group[0]][0][length:end] for group, end in zip(groups, ends, strict=True)]
        tails.sort(key=lambda tail: -len(tail.tokens))
        # Padding beyond the room or the learned positions would be NaN, and in the next layer so would the tokens before it.
        last = self.model.config.max_positions
        batches, room = [], 1
        while tails:
            padded = -(-(len(tails[0].tokens) - 1) // self.pieces[-1]) * self.pieces[-1]
            if last is not None:
                padded = min(padded, last - ends[tails[0].slot])
            fitting = [tail for tail in tails if last is None or ends[tail.slot] + padded <= last][: self.batch_size]
            batches.append((padded, fitting))
            room = max(room, padded + max(ends[tail.slot] for tail in fitting))
            taken = {tail.pair for tail in fitting}
            tails = [tail for tail in tails if tail.pair not in taken]
        return heads, batches, self._room(room)

    def _scores(
        self, rows: list[tuple[np.ndarray, np.ndarray]], heads: list[np.ndarray], batches: list[tuple[int, list[_Tail]]],
        start: PyTree,
    ) -> Iterator[tuple[int, Score]]:  # fmt: skip
        """(index, score) of the pairs of a plan. `start` is the cache after what all contexts begin with."""
        cache = self._read(heads, start)[1]
        for length, batch in batches:
            slots = _filled([tail.slot for tail in batch], self.batch_size)
            likelihoods, greedy = self._score([tail.tokens for tail in batch], length, _take(cache, slots))
            for row, (_, index, tail) in enumerate(batch):
                part = slice(len(tail) - 1 - len(rows[index][1]), len(tail) - 1)
                yield index, Score(likelihoods[row, part], bool(greedy[row, part].all()))

    def _score(self, tails: list[np.ndarray], length: int, cache: PyTree) -> tuple[np.ndarray, np.ndarray]:
        """ln p and whether it is the most likely token, [batch_size, length]: of every token but the first, padding included."""
        # The padding comes after the tokens, so it changes nothing but states that are not used any more.
        tokens = np.zeros((self.batch_size, length + 1), np.int32)
        for row, tail in zip(tokens, tails):
            row[: len(tail)] = tail
        results, start = [], 0
        while start < length:
            piece = next((piece for piece in self.pieces if piece <= length - start), length - start)
            part = slice(start, start + piece)
            *result, cache = _score_piece(
                self._graphdef, self._params, tokens[:, :-1][:, part], tokens[:, 1:][:, part], cache
            )
            results.append(result)
            start += piece
        likelihoods, greedy = (np.concatenate([np.asarray(part) for part in parts], axis=1) for parts in zip(*results))
        return likelihoods, greedy

    def _read(self, rows: list[np.ndarray], cache: PyTree) -> tuple[jax.Array, PyTree]:
        """(logits of the next token [batch_size, vocabulary], cache) after rows of unequal length, each read exactly to its end."""
        rows = _filled(rows, self.batch_size)
        lengths, read = np.array([len(row) for row in rows]), np.zeros(self.batch_size, int)
        logits = jnp.zeros((self.batch_size, self.model.config.vocab_size), jnp.float32)
        for piece in self.pieces:
            while (active := lengths - read >= piece).any():
                tokens = np.zeros((self.batch_size, piece), np.int32)
                for i in np.flatnonzero(active):
                    tokens[i] = rows[i][read[i] : read[i] + piece]
                logits, cache = _read_piece(self._graphdef, self._params, tokens, active, logits, cache)
                read[active] += piece
        rest = lengths - read
        if rest.any():
            tokens = np.zeros((self.batch_size, self.pieces[-1]), np.int32)
            for i in np.flatnonzero(rest):
                tokens[i, : rest[i]] = rows[i][read[i] :]
            logits, cache = _read_rest(self._graphdef, self._params, tokens, rest, logits, cache)
        return logits, cache

    def _row(self, name: str, row: ArrayLike) -> np.ndarray:
        array = array_of(name, row)
        if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}; it should be integers [time] with at least one token."
            )
        check_tokens(array, self.model.config.vocab_size, name)
        return array.astype(np.int32)

    def _room(self, length: int) -> int:
        """Tokens to make room for, so that few different numbers occur."""
        return max(self.pieces[0], 1 << (length - 1).bit_length())

    def _cache(self, room: int) -> PyTree:
        if self._empty is None or self._empty[0] != room:
            self._empty = room, self.model.init_cache(self.batch_size, room)
        return self._empty[1]


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _filled(items: list[T], size: int) -> list[T]:
    return items + items[-1:] * (size - len(items))


@jax.jit
def _gather(cache: PyTree, index: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[:, index], cache)


def _take(cache: PyTree, rows: list[int]) -> PyTree:
    return cache if rows == list(range(len(rows))) else _gather(cache, np.array(rows))


@functools.partial(jax.jit, static_argnums=0)
def _score_piece(
    graphdef: nnx.GraphDef, params: PyTree, tokens: jax.Array, targets: jax.Array, cache: PyTree
) -> tuple[jax.Array, jax.Array, PyTree]:
    logits, cache = nnx.merge(graphdef, params).extend(tokens, cache)
    logits = logits.astype(jnp.float32)
    likelihoods = -optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return likelihoods, jnp.argmax(logits, axis=-1) == targets, cache


@functools.partial(jax.jit, static_argnums=0)
def _read_piece(
    graphdef: nnx.GraphDef, params: PyTree, tokens: jax.Array, active: jax.Array, logits: jax.Array, cache: PyTree
) -> tuple[jax.Array, PyTree]:
    new, after = nnx.merge(graphdef, params).extend(tokens, cache)
    return _where(active, (new[:, -1].astype(jnp.float32), after), (logits, cache))


@functools.partial(jax.jit, static_argnums=0)
def _read_rest(
    graphdef: nnx.GraphDef, params: PyTree, tokens: jax.Array, lengths: jax.Array, logits: jax.Array, cache: PyTree
) -> tuple[jax.Array, PyTree]:
    """The first lengths[i] tokens of row i, one at a time: a state cannot be taken from inside a longer piece."""
    model = nnx.merge(graphdef, params)

    def one(carry: tuple[jax.Array, PyTree], xs: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, PyTree], None]:
        token, i = xs
        new, after = model.extend(token[:, None], carry[1])
        return _where(i < lengths, (new[:, -1].astype(jnp.float32), after), carry), None

    (logits, cache), _ = jax.lax.scan(one, (logits, cache), (tokens.T, jnp.arange(tokens.shape[1])))
    return logits, cache


def _where(active: jax.Array, new: tuple[jax.Array, PyTree], old: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
    """(logits, cache) of the rows that are active, and as before of the others."""

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:  # leaves of a cache have the batch at axis 1
        return jnp.where(active.reshape(1, -1, *(1,) * (new.ndim - 2)), new, old)

    return jnp.where(active[:, None], new[0], old[0]), jax.tree.map(chosen, new[1], old[1])
