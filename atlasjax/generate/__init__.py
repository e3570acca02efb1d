"""Sampling text from a language model through its streaming cache."""

from atlasjax.generate.context import Context, read
from atlasjax.generate.sampling import (
    RowSampling,
    SamplingConfig,
    filtered_logits,
    penalized_logits,
    sample,
    sample_rows,
)
from atlasjax.generate.saved import ContextFiles, load_context, save_context
from atlasjax.generate.streams import generate, stream
from atlasjax.generate.text import TextStream

__all__ = [
    "Context",
    "ContextFiles",
    "RowSampling",
    "SamplingConfig",
    "TextStream",
    "filtered_logits",
    "generate",
    "load_context",
    "penalized_logits",
    "read",
    "sample",
    "sample_rows",
    "save_context",
    "stream",
]
