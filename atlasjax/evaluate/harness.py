"""A model as EleutherAI's lm-eval asks it: log-likelihoods, rolling log-likelihoods, and generation until a stop string.

    lm = HarnessModel(model, tokenizer, prefix_token=10)
    results = lm_eval.simple_evaluate(lm, tasks=["my_task"])

Needs the extra `eval`.
"""

import collections
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from atlasjax import check
from atlasjax.evaluate.scoring import Score, Scorer
from atlasjax.generate import SamplingConfig
from atlasjax.nn import LanguageModel

_log = logging.getLogger(__name__)
_SAMPLING = ("top_k", "top_p", "min_p")  # without effect on greedy texts
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_return_sequences": (1,), "use_cache": (True, False), "presence_penalty": (0,), "frequency_penalty": (0,)
}  # fmt: skip
"""Arguments of other libraries' generation, and the values of them that change nothing."""


class Text(Protocol):
    """The methods of a tokenizer that are used here."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, /) -> np.ndarray:
        """Return the token ids of `text`, integers [num_tokens]. Names of control tokens in it are text."""
        ...

    def guarded(self, content: str, /) -> str:
        """Return a text that is part of another, marked so that no name of a control token in it is read as one."""
        ...

    def encode_controlled(self, text: str, /) -> np.ndarray:
        """Return the token ids of a text in which names of control tokens are those tokens, except in what is `guarded`."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of `ids`, in which incomplete UTF-8 is U+FFFD."""
        ...


class Results(Protocol):
    """Results of requests, each a kind and its arguments, that outlive a command (`atlasjax.cli.kept`)."""

    def get(self, kind: str, arguments: tuple[Any, ...], /) -> Any:
        """The result, a value of JSON; None if there is none."""
        ...

    def add(self, kind: str, arguments: tuple[Any, ...], result: Any, /) -> None:
        """Keeps a result."""
        ...


class HarnessModel(TemplateLM):
    """A model of lm-eval's interface.

    A context that several continuations share is read once, and a context may have any length. Only a model with learned positions
    has a longest one: then the beginning of a longer context is left out, as lm-eval does with other models, with a warning, and
    `truncated` counts it.

    Args:
      model: a `LanguageModel`.
      tokenizer: its tokenizer.
      prefix_token: stands before a document, and is the context where a task gives none.
      begins_text: whether `prefix_token` is a token of its own for the beginning of texts. Then it is not repeated before a text
        that begins with it.
      end_tokens: tokens that end a generated text.
      window: most tokens of a window of a rolling log-likelihood, as lm-eval cuts them: each token of a document is predicted once,
        from those before it in its window. None: the whole document is read as one stream, whatever its length.
      chat: (messages, whether the model's answer begins after them) → text, for `apply_chat_template` of lm-eval. A message is
        {"role": …, "content": …}. Without such an answer the last message is the beginning of one, which the text ends with.
      batch_size, pieces: as for `Scorer`.
      seed: of generation with sampling.
      about: what `get_model_info` adds to the results.
      kept: results of requests that need not be computed again, and where new ones are kept as soon as they are known. Sampled
        texts are not kept: others would repeat their noise.

    Raises:
      ValueError: a token is not in the vocabulary, or a number is not positive.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Text,
        *,
        prefix_token: int,
        begins_text: bool = False,
        end_tokens: Sequence[int] = (),
        window: int | None = 1024,
        chat: Callable[[Sequence[Mapping[str, str]], bool], str] | None = None,
        batch_size: int = 8,
        pieces: Sequence[int] = (256, 32),
        seed: int = 0,
        about: Mapping[str, object] | None = None,
        kept: Results | None = None,
    ):
        super().__init__()
        check.integer("HarnessModel", "window", window, optional=True)
        for token in (prefix_token, *end_tokens):
            inside = check.is_integer(token, 0) and token < model.config.vocab_size
            check.require(inside, "token", token, f"in the vocabulary, [0, {model.config.vocab_size})")
        self.truncated = 0
        self._scorer = Scorer(model, batch_size=batch_size, pieces=pieces)
        self._text, self._prefix, self._begins, self._ends = tokenizer, prefix_token, begins_text, tuple(end_tokens)
        self._seed, self._about, self._chat, self._results = seed, about or {}, chat, kept
        self._longest = model.config.max_positions
        if self._longest is not None:
            window = self._longest if window is None else min(window, self._longest)
        self._window = window

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; `prefix_token` if there is none."""
        return self._ends[0] if self._ends else self._prefix

    @property
    def prefix_token_id(self) -> int:
        """`prefix_token`."""
        return self._prefix

    @property
    def batch_size(self) -> int:
        """Rows read together."""
        return self._scorer.batch_size

    def get_model_info(self) -> dict[str, object]:
        """Facts that lm-eval adds to the config in its results: `about`, and what was counted."""
        window = "whole documents" if self._window is None else self._window
        return {**self._about, "prefix_token": self._prefix, "window": window, "truncated_contexts": self.truncated}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Token ids of a text. Nothing is added to it. With `chat`, control tokens that its template writes are control tokens."""
        return (self._text.encode if self._chat is None else self._text.encode_controlled)(string).tolist()

    @property
    def tokenizer_name(self) -> str:
        """The name by which lm-eval tells kept texts of conversations apart. Nothing is kept here."""
        return "atlasjax"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Raises:
          ValueError: there is no `chat`, or it refuses the messages.
        """
        if self._chat is None:
            raise ValueError("apply_chat_template needs a model with chat=….")
        history = [{**message, "content": self._text.guarded(message["content"])} for message in chat_history]
        return self._chat(history, add_generation_prompt)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(ln p, whether greedy decoding gives it) of each continuation; without a context, given `prefix_token`."""
        encoded = []
        for request in requests:
            context, text = request.args
            text = text if self._chat is None else self._text.guarded(text)
            if context.strip():
                encoded.append((request.args, *self._encode_pair(context, text)))
            else:  # spaces belong to the continuation, as everywhere in lm-eval
                encoded.append((request.args, [self._prefix], self._without_prefix(self.tok_encode(context + text))))
        return self._loglikelihood_tokens(encoded, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of each document, of all its tokens, given `prefix_token`."""
        sums, left = self._known("loglikelihood_rolling", [request.args for request in requests])
        pairs: list[tuple[list[int], list[int]]] = []
        owners, places = list[int](), dict[int, list[int]]()
        for owner in left:
            windows = list(self._windows(self._text.encode(requests[owner].args[0]).tolist()))
            places[owner] = list(range(len(pairs), len(pairs) + len(windows)))
            pairs += windows
            owners += [owner] * len(windows)
        waiting, scores = collections.Counter(owners), dict[int, float]()

        def known(index: int, score: Score) -> None:
            owner, scores[index] = owners[index], score.log_likelihood
            waiting[owner] -= 1
            if not waiting[owner]:
                sums[owner] = sum(scores[i] for i in places[owner])
                self._keep("loglikelihood_rolling", requests[owner].args, sums[owner])

        for owner in set(left) - waiting.keys():  # without a token
            sums[owner] = 0.0
        self._score(pairs, "rolling log-likelihoods", disable_tqdm, known)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to a stop string, an end token or the number of tokens asked for (256 by default)."""
        before_them = self.truncated
        asked = [generation(request.args[1]) for request in requests]
        texts, left = self._known("generate_until", [request.args for request in requests])
        groups: dict[SamplingConfig, list[tuple[int, list[int], int, list[str]]]] = {}
        for i in left:
            text, (config, number, stop) = requests[i].args[0], asked[i]
            context = self._kept(self.tok_encode(text) or [self._prefix], number, text)
            groups.setdefault(config, []).append((i, context, number, stop))
        self._warn(before_them, len(left))
        with tqdm(total=len(left), desc="Generating", disable=disable_tqdm) as bar:
            for config, members in groups.items():
                places, contexts, numbers, stops = zip(*members)

                def known(
                    index: int, text: str, places: Sequence[int] = places, keeps: bool = config.temperature == 0
                ) -> None:
                    texts[places[index]] = text
                    self._keep("generate_until", requests[places[index]].args, text, keeps)
                    bar.update()

                self._scorer.generate(
                    contexts, numbers, self._text, stop=stops, end_tokens=self._ends, config=config, seed=self._seed,
                    vocab_size=self._text.vocab_size, on_result=known,
                )  # fmt: skip
        return texts

    def check_generation(self, options: Mapping[str, Any]) -> None:
        """Checks a task's arguments for generation.

        Raises:
          ValueError: one is not served, or so many tokens do not fit the model.
        """
        _, number, _ = generation(options)
        if self._longest is not None and number >= self._longest:
            raise ValueError(
                f"max_gen_toks is {number}; a model with max_positions={self._longest} has room for {self._longest - 1}."
            )

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: object
    ) -> list[tuple[float, bool]]:
        scores, left = self._known("loglikelihood", [arguments for arguments, _, _ in requests])
        pairs, before_them = [], self.truncated
        for i in left:
            (before, text), context, continuation = requests[i]
            if not continuation:
                raise ValueError(
                    f"the continuation {text!r} has no token of its own after {before[-40:]!r}, so it has no log-likelihood."
                )
            pairs.append((self._kept(context, len(continuation) - 1, text), continuation))
        self._warn(before_them, len(left))

        def known(index: int, score: Score) -> None:
            scores[left[index]] = score.log_likelihood, score.is_greedy
            self._keep("loglikelihood", requests[left[index]][0], scores[left[index]])

        self._score(pairs, "log-likelihoods", disable_tqdm, known)
        return [(value, is_greedy) for value, is_greedy in scores]

    def _known(self, kind: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[list[Any], list[int]]:
        """The results that are kept, each None if there is none, and the places of those."""
        results = [None if self._results is None else self._results.get(kind, one) for one in arguments]
        return results, [i for i, result in enumerate(results) if result is None]

    def _keep(self, kind: str, arguments: tuple[Any, ...], result: Any, keeps: bool = True) -> None:
        self.cache_hook.add_partial(kind, arguments, result)
        if keeps and self._results is not None:
            self._results.add(kind, arguments, result)

    def _without_prefix(self, tokens: list[int]) -> list[int]:
        return tokens[1:] if self._begins and tokens[:1] == [self._prefix] else tokens

    def _windows(self, tokens: list[int]) -> Iterable[tuple[list[int], list[int]]]:
        tokens = self._without_prefix(tokens)
        if self._window is None:
            return [([self._prefix], tokens)] if tokens else []
        return map(make_disjoint_window, get_rolling_token_windows(tokens, self._prefix, self._window, 1))

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], what: str, disable_tqdm: bool,
        known: Callable[[int, Score], None],
    ) -> None:  # fmt: skip
        with tqdm(total=len(pairs), desc=f"Computing {what}", disable=disable_tqdm) as bar:

            def on_result(index: int, score: Score) -> None:
                known(index, score)
                bar.update()

            self._scorer.score(pairs, on_result=on_result)

    def _kept(self, context: list[int], after: int, text: str) -> list[int]:
        """The end of a context that fits before `after` tokens."""
        if self._longest is None or len(context) + after <= self._longest:
            return context
        room = self._longest - after
        if room < 1:
            raise ValueError(
                f"{after + 1} tokens after a context do not fit a model with max_positions={self._longest}: {text[:40]!r} …"
            )
        self.truncated += 1
        return context[-room:]

    def _warn(self, before: int, requests: int) -> None:
        if self.truncated > before:
            _log.warning(
                "%d of %d contexts were longer than the model's %d positions allow and lost their beginning.",
                self.truncated - before, requests, self._longest,
            )  # fmt: skip


def generation(options: Mapping[str, Any]) -> tuple[SamplingConfig, int, list[str]]:
    """(how to sample, most tokens, stop strings) of lm-eval's arguments for generation.

    Raises:
      ValueError: one is unknown, or has a value that is not served.
    """
    try:
        given = dict(normalize_gen_kwargs(dict(options)))
    except TypeError as error:
        raise ValueError(f"generation_kwargs is {options!r:.200} ({error}).") from None
    stop, number, sample = given.pop("until"), given.pop("max_gen_toks"), given.pop("do_sample")
    temperature, penalty = given.pop("temperature", 1.0), given.pop("repetition_penalty", None)
    settings = {name: given.pop(name, None) for name in _SAMPLING}
    left = [name for name, value in given.items() if value is not None and value not in _NEUTRAL.get(name, ())]
    if left:
        known = ("until", "max_gen_toks", "do_sample", "temperature", "repetition_penalty", *_SAMPLING)
        raise ValueError(
            f"generation_kwargs has {', '.join(f'{name}: {given[name]!r:.80}' for name in left)}; known are {', '.join(known)}."
        )
    check.integer("generation_kwargs", "max_gen_toks", number)
    for one in stop:
        check.require(isinstance(one, str) and one != "", "until", one, "a string that is not empty")
    everything = {"top_k": (None, 0, -1), "top_p": (None,), "min_p": (None, 0)}  # as other libraries write all tokens
    used = {name: value for name, value in settings.items() if sample and value not in everything[name]}
    penalized = {} if penalty is None else {"repetition_penalty": penalty}
    return SamplingConfig(float(temperature) if sample else 0.0, **used, **penalized), number, stop
