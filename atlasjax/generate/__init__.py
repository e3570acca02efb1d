"""Sampling text from a language model through its streaming cache."""

from atlasjax.generate.context import Context, read
from atlasjax.generate.sampling import SamplingConfig, filtered_logits, penalized_logits, sample
from atlasjax.generate.saved import load_context, save_context
from atlasjax.generate.streams import generate, stream
from atlasjax.generate.text import TextStream

__all__ = [
    "Context",
    "SamplingConfig",
    "TextStream",
    "filtered_logits",
    "generate",
    "load_context",
    "penalized_logits",
    "read",
    "sample",
    "save_context",
    "stream",
]
