"""The report that `atlasjax train` prints at its end: baselines, a sample, and a prompt to try."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np

from atlasjax.data.config import DataConfig, Split
from atlasjax.data.documents import in_order
from atlasjax.data.pipeline import Pipeline
from atlasjax.data.prepared import decoded
from atlasjax.data.sources import load_documents
from atlasjax.data.tokenizers import Tokenizer, make_tokenizer
from atlasjax.evaluate.ngram import baselines as ngram_baselines
from atlasjax.generate import generate
from atlasjax.generate.streams import begin
from atlasjax.nn import LanguageModel, ModelConfig
from atlasjax.nn.mixer_check import why_not_decoded

# Two whole words with which a line or a sentence begins; two anywhere; or what a text without spaces has.
_BEGINNINGS = (r"(?:\n\s*|[.!?] )(\w+ \w+)[\s.,;:]", r"\s(\w+ \w+)[\s.,;:]", r"\w{1,20}")
_SAMPLE = 200  # tokens of the sample
_BASELINE_CHARACTERS = 5_000_000  # counting n-grams of them takes seconds


def baselines(config: DataConfig) -> dict[str, float]:
    """Bits per byte of byte n-gram models, fitted to the training text of `config`, on its held-out text.

    If a text has more than 5 million characters, only its beginning counts, and the names say so. Empty if nothing is held out.
    """
    if not config.has_validation:
        return {}
    (train, cut), (held_out, _) = (_beginning(config, split) for split in ("train", "validation"))
    scores = ngram_baselines(train, held_out)
    part = f" of {len(train) / 1e6:.0f}M chars" if cut else ""
    return {f"unigram of bytes{part}": scores["unigram"], f"interpolated trigram{part}": scores["trigram"]}


def _beginning(config: DataConfig, split: Split) -> tuple[str, bool]:
    """A split's text, or the beginning of it (of each of several prepared sets), and whether it is longer."""
    if config.source != "prepared":
        return _joined(in_order(load_documents(config, split)), config.separator, _BASELINE_CHARACTERS)
    parts = []
    for path in config.paths:
        one = dataclasses.replace(config, paths=(path,), weights=())
        pieces = decoded(one, make_tokenizer(one), split)
        parts.append(_joined(pieces, "", _BASELINE_CHARACTERS // len(config.paths)))
    return "".join(text for text, _ in parts), any(cut for _, cut in parts)


def _joined(texts: Iterator[str], separator: str, most: int) -> tuple[str, bool]:
    taken: list[str] = []
    size = 0
    for text in texts:
        if taken and size + len(text) > most:
            return separator.join(taken), True
        taken.append(text)
        size += len(text)
    return separator.join(taken), False


def beginning(data: Pipeline, tokenizer: Tokenizer) -> str:
    """A prompt from the text that a model was trained on, from its first batch. "The " if that has no word."""
    text = "\0".join(tokenizer.decode(row.tolist()) for row in np.asarray(next(iter(data))["inputs"]))
    for pattern in _BEGINNINGS:
        if found := collections.Counter(re.findall(pattern, text)):
            return found.most_common(1)[0][0]
    return "The "


def tokens_that_fit(config: ModelConfig, prompt: np.ndarray, num_tokens: int) -> int:
    """How many of `num_tokens` new tokens a model has positions for after a prompt; 0 if it decodes none."""
    if why_not_decoded(config) is not None:
        return 0
    longest = config.max_positions
    return num_tokens if longest is None else max(0, min(num_tokens, longest - len(prompt)))


def begin_sample(
    compiles: Callable[..., object], model: LanguageModel, tokenizer: Tokenizer, *, prompt: str, seed: int
) -> None:
    """Begins to compile the program of `sample_text`, for a model whose parameters may be shapes."""
    before, num_tokens = _sample(model.config, tokenizer, prompt)
    if num_tokens:
        begin(compiles, model, before, num_tokens, seed=seed, vocab_size=tokenizer.vocab_size)


def sample_text(model: LanguageModel, tokenizer: Tokenizer, *, prompt: str, seed: int) -> str | None:
    """A prompt and its continuation at temperature 0.8. None: the model decodes no tokens, or has no positions after the prompt."""
    before, num_tokens = _sample(model.config, tokenizer, prompt)
    if not num_tokens:
        return None
    tokens = generate(model, before, num_tokens, seed=seed, vocab_size=tokenizer.vocab_size)
    return prompt + tokenizer.decode(tokens[0].tolist())


def _sample(config: ModelConfig, tokenizer: Tokenizer, prompt: str) -> tuple[np.ndarray, int]:
    """The tokens of a prompt, [1, time], and how many follow it."""
    before = tokenizer.encode(prompt)
    return before[None], tokens_that_fit(config, before, _SAMPLE)
