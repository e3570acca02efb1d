"""Sampling text from a language model through its streaming cache."""

from typing import TYPE_CHECKING

from atlasjax.names import lazily

if TYPE_CHECKING:
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

# Loaded on first use: the options of a command need no Flax.
__getattr__ = lazily(
    __name__,
    {
        "context": "Context read",
        "sampling": "RowSampling SamplingConfig filtered_logits penalized_logits sample sample_rows",
        "saved": "ContextFiles load_context save_context",
        "streams": "generate stream",
        "text": "TextStream",
    },
)
