"""Training and evaluation text: sources, tokenizers, and Grain pipelines with an exact position. Also a synthetic task.

config = DataConfig(source="text", paths=("books/",), sequence_length=1024, batch_size=32)
tokenizer = make_tokenizer(config)
batches = iter(make_pipeline(config, tokenizer, "train"))
batch, position = next(batches), batches.get_state()
"""

from typing import TYPE_CHECKING

from atlasjax.names import lazily

if TYPE_CHECKING:
    from atlasjax.data.associative_recall import RecallConfig, recall_accuracy, recall_sequences
    from atlasjax.data.config import DataConfig
    from atlasjax.data.manifest import Manifest
    from atlasjax.data.pipeline import BatchIterator, Pipeline, make_pipeline
    from atlasjax.data.preparation import prepare
    from atlasjax.data.sources import load_documents, load_text
    from atlasjax.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer

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

# Imported on first use, because Grain is slow to import.
__getattr__ = lazily(
    __name__,
    {
        "associative_recall": "RecallConfig recall_accuracy recall_sequences",
        "config": "DataConfig",
        "manifest": "Manifest",
        "pipeline": "BatchIterator Pipeline make_pipeline",
        "preparation": "prepare",
        "sources": "load_documents load_text",
        "tokenizers": "Tokenizer load_tokenizer make_tokenizer",
    },
)
