"""Sampling text from a language model through its streaming cache."""

import importlib
from typing import TYPE_CHECKING

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

# Loaded on first use: the options of a command need no Flax.
_HOME = {
    "Context": "context",
    "read": "context",
    "RowSampling": "sampling",
    "SamplingConfig": "sampling",
    "filtered_logits": "sampling",
    "penalized_logits": "sampling",
    "sample": "sampling",
    "sample_rows": "sampling",
    "ContextFiles": "saved",
    "load_context": "saved",
    "save_context": "saved",
    "generate": "streams",
    "stream": "streams",
    "TextStream": "text",
}

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


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
