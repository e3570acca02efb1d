"""Training and evaluation text: sources, tokenizers, and Grain pipelines with an exact position. Also a synthetic task.

config = DataConfig(source="text", paths=("books/",), sequence_length=1024, batch_size=32)
tokenizer = make_tokenizer(config)
batches = iter(make_pipeline(config, tokenizer, "train"))
batch, position = next(batches), batches.get_state()
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlasjax.data.associative_recall import RecallConfig, recall_accuracy, recall_sequences
    from atlasjax.data.config import DataConfig
    from atlasjax.data.manifest import Manifest
    from atlasjax.data.pipeline import BatchIterator, Pipeline, make_pipeline
    from atlasjax.data.preparation import prepare
    from atlasjax.data.sources import load_documents, load_text
    from atlasjax.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

# Imported on first use, because Grain is slow to import.
_HOME = {
    "RecallConfig": "associative_recall",
    "recall_accuracy": "associative_recall",
    "recall_sequences": "associative_recall",
    "DataConfig": "config",
    "Manifest": "manifest",
    "BatchIterator": "pipeline",
    "Pipeline": "pipeline",
    "make_pipeline": "pipeline",
    "prepare": "preparation",
    "load_documents": "sources",
    "load_text": "sources",
    "Tokenizer": "tokenizers",
    "load_tokenizer": "tokenizers",
    "make_tokenizer": "tokenizers",
}

__all__ = [
    "BatchIterator",
    "DataConfig",
    "Manifest",
    "Pipeline",
    "RecallConfig",
    "Tokenizer",
    "load_documents",
    "load_text",
    "load_tokenizer",
    "make_pipeline",
    "make_tokenizer",
    "prepare",
    "recall_accuracy",
    "recall_sequences",
]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
