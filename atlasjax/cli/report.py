"""What `atlasjax train` prints at its end: baselines, a sample, and a prompt to try."""

import collections
import re

import numpy as np

from atlasjax.data.config import DataConfig
from atlasjax.data.pipeline import Pipeline
from atlasjax.data.sources import load_text
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.evaluate.ngram import baselines as ngram_baselines
from atlasjax.generate import SamplingConfig, generate
from atlasjax.nn import LanguageModel, ModelConfig
from atlasjax.nn.mixer_check import why_not_decoded

# Two whole words with which a line or a sentence begins; two anywhere; or what a text without spaces has.
_BEGINNINGS = (r"(?:\n\s*|[.!?] )(\w+ \w+)[\s.,;:]", r"\s(\w+ \w+)[\s.,;:]", r"\w{1,20}")
_BASELINE_CHARACTERS = 50_000_000  # beyond this, counting n-grams takes longer than it is worth


def baselines(config: DataConfig) -> dict[str, float]:
    """Bits per byte of byte n-gram models, fitted to the training text of `config`, on its held-out text.

    Empty if nothing is held out or the text does not fit in memory.
    """
    if not config.has_validation or not config.is_in_memory:
        return {}
    train = load_text(config, "train")
    if len(train) > _BASELINE_CHARACTERS:
        return {}
    scores = ngram_baselines(train, load_text(config, "validation"))
    return {"unigram of bytes": scores["unigram"], "interpolated trigram": scores["trigram"]}


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


def sample_text(
    model: LanguageModel, tokenizer: Tokenizer, *, prompt: str, num_tokens: int = 200, seed: int = 0
) -> str | None:
    """A prompt and its continuation at temperature 0.8. None: the model decodes no tokens, or has no positions after the prompt."""
    before = tokenizer.encode(prompt)
    num_tokens = tokens_that_fit(model.config, before, num_tokens)
    if not num_tokens:
        return None
    tokens = generate(
        model,
        before[None],
        num_tokens,
        config=SamplingConfig(),
        seed=seed,
        vocab_size=tokenizer.vocab_size,
    )
    return prompt + tokenizer.decode(tokens[0].tolist())
