"""Opens the documents of the training and validation splits of a `DataConfig`."""

import contextlib
from collections.abc import Sequence

from atlasjax import check
from atlasjax.data.config import DataConfig, HeldOut, Split
from atlasjax.data.documents import Documents, EveryNth, TextDocuments, in_order
from atlasjax.data.parquet import ParquetDocuments
from atlasjax.data.text import jsonl_documents, text_documents
from atlasjax.data.tfds import TfdsDocuments
from atlasjax.names import call_with, named, resolve

BLOCK_SIZE = 4096  # characters


def embedded_documents() -> TextDocuments:
    """The Python language reference that ships with CPython, one document per topic, sorted by topic.

    English prose with some code and grammar, about 370 to 410 kB depending on the version of Python. Topics share whole
    sections. A paragraph that appeared before, up to white space, is dropped; otherwise half of the held-out lines would also be
    in the training text.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = []
    for name in sorted(topics):
        kept = []
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                kept.append(paragraph)
        texts.append("\n\n".join(kept))
    return TextDocuments([text for text in texts if text])


def load_documents(config: DataConfig, split: Split) -> Documents:
    """Open the documents of a split.

    Args:
      config: the source, and how its validation text is held out.
      split: "train" or "validation".

    Returns:
      The documents. A contiguous stream joins them with `config.separator`.

    Raises:
      FileNotFoundError: a path or dataset is missing.
      ValueError: no validation split is configured, the held-out part would be empty, or the source has unusable content.
    """
    check.literal("split", split, Split)
    if split == "validation" and not config.has_validation:
        raise ValueError(
            "There is no validation split: --data.validation-fraction is 0 and no separate validation data is given "
            "(--data.validation-paths; `atlasjax evaluate --text FILE`)."
        )
    documents = open_documents(config, separate=config.separate_validation and split == "validation")
    if not len(documents):
        raise ValueError(f"data source {config.source!r} has no documents.")
    if config.separate_validation or not config.has_validation:
        return documents
    period = config.held_out_period
    how = held_out(config, len(documents))
    if how == "documents":
        if len(documents) < period:
            cut = "--data.held-out tail, " if config.is_in_memory else ""
            raise ValueError(
                f"--data.validation-fraction {config.validation_fraction} holds out every {period}th document, but there are "
                f"only {len(documents)}; use {cut}a larger fraction, or separate validation data (--data.validation-paths)."
            )
        return EveryNth(documents, period, complement=split == "train")
    assert isinstance(documents, TextDocuments), "DataConfig allows cutting only where the text is in memory"
    if how == "tail":
        return _tails(documents, config.validation_fraction, split)
    return _blocks(config.separator.join(documents.texts), period, split)


def load_text(config: DataConfig, split: Split) -> str:
    """Return the text of a whole split, its documents joined by `config.separator`. Raises as `load_documents`."""
    documents = load_documents(config, split)
    return config.separator.join(in_order(documents))


def open_documents(config: DataConfig, *, separate: bool) -> Documents:
    if config.has_own_source:
        return _own(config, "validation" if separate else "train")
    if config.source == "prepared":
        raise ValueError("source 'prepared' contains tokens, not text.")
    paths = config.validation_paths if separate else config.paths
    if config.source == "embedded":
        return embedded_documents()
    if config.source == "text":
        return text_documents(paths, config.suffixes, config.encoding, config.errors)
    if config.source == "jsonl":
        return jsonl_documents(paths, config.column, config.encoding, config.errors)
    if config.source == "parquet":
        return ParquetDocuments(paths, config.column)
    split = config.tfds_validation_split if separate else config.tfds_split
    return TfdsDocuments(config.tfds_name, split, config.tfds_feature, config.tfds_data_dir)


class _Sequence:
    """A user's sequence of strings as `Documents`. Missing attributes are as of texts in memory."""

    def __init__(self, source: str, texts: Sequence[str]):
        self._source, self._texts = source, texts
        self.block_offsets = getattr(texts, "block_offsets", None)
        self.blocks_in_memory = getattr(texts, "blocks_in_memory", 1)

    def __len__(self) -> int:
        with self._named("its length"):
            return len(self._texts)

    def __getitem__(self, index: int, /) -> str:
        with self._named(f"document {index}"):
            text = self._texts[index]
        if not isinstance(text, str):
            raise ValueError(
                f"data source {self._source!r}: document {index} is a {type(text).__name__}; it must be a str."
            )
        return text

    def _named(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Errors of storage may pass, and an IndexError ends a loop."""
        return named(f"data source {self._source!r}: {what}", but=(OSError, IndexError))


def _own(config: DataConfig, split: Split) -> Documents:
    kind = "data source"
    keywords = {"split": split} if config.separate_validation else {}
    make = resolve(kind, config.source, {})
    texts = call_with(kind, config.source, make, options=config.source_options, but=(OSError,), **keywords)
    if isinstance(texts, str) or not (hasattr(texts, "__len__") and hasattr(texts, "__getitem__")):
        raise ValueError(f"{kind} {config.source!r} gave a {type(texts).__name__}; it must be a sequence of strings.")
    return _Sequence(config.source, texts)


def held_out(config: DataConfig, num_documents: int) -> HeldOut:
    """How validation text is held out; never "auto"."""
    if config.held_out != "auto":
        return config.held_out
    if config.source == "embedded" and config.packing == "contiguous":
        return "blocks"  # topics are sorted by name, so the tail would be a different kind of text
    if config.source == "text" and num_documents < 2 * config.held_out_period:
        return "tail"
    return "documents"


def _tails(documents: TextDocuments, fraction: float, split: Split) -> TextDocuments:
    """The head or the tail of every document."""
    parts = []
    for text in documents.texts:
        cut = round(len(text) * (1 - fraction))
        parts.append(text[:cut] if split == "train" else text[cut:])
    return TextDocuments([part for part in parts if part])


def _blocks(text: str, period: int, split: Split) -> TextDocuments:
    """Every `period`-th block, or all others, joined. A block ends with the line that reaches `BLOCK_SIZE`."""
    blocks, start = [], 0
    while start < len(text):
        end = text.find("\n", start + BLOCK_SIZE - 1) + 1
        if not end:
            end = len(text)
        blocks.append(text[start:end])  # whole lines, so that no line is in both splits
        start = end
    kept = [block for i, block in enumerate(blocks) if (i % period == period // 2) == (split == "validation")]
    return TextDocuments(["".join(kept)])
