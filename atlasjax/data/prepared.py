"""Opens prepared data sets for training and evaluation."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from atlasjax import storage
from atlasjax.data.config import DataConfig, Split
from atlasjax.data.files import say_once
from atlasjax.data.manifest import Manifest, read_manifest
from atlasjax.data.prepared_copies import local_copy
from atlasjax.data.sources import load_documents
from atlasjax.data.token_files import TokenFiles
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.data.windows import token_stream, with_sizes

_DECODED = 2**20  # tokens decoded at once


@dataclasses.dataclass(frozen=True)
class PreparedSplit:
    """One split of one prepared data set.

    Attributes:
      tokens: the tokens of its documents.
      digest: its number of documents, number of tokens and checksum, which identify it.
    """

    tokens: TokenFiles
    digest: str


def open_prepared(config: DataConfig, tokenizer: Tokenizer, split: Split) -> tuple[TokenFiles, list[PreparedSplit]]:
    """Open a split of the prepared data sets of a config. File sizes are checked; content is read, and compared with its checksum,
    when it is used. Sets in a bucket are copied to the disk first (`local_copy`, whose errors are raised too).

    Returns:
      The documents of all sets as one sequence, and each set separately.

    Raises:
      FileNotFoundError: a folder has no finished preparation, or a file is missing.
      ValueError: a set was prepared with another tokenizer, packing or separator, or lacks the split; or a file is damaged.
    """
    files, sets = [], []
    for name in config.paths:
        folder = storage.fetched(name)
        manifest = read_manifest(folder)
        _check(name, manifest, config, tokenizer, split)
        if isinstance(folder, storage.StorePath):
            folder = local_copy(folder)
        mine = [(folder, file) for file in manifest.splits[split]]
        files += mine
        if any(file.ends_crc32 is None for _, file in mine):
            say_once(
                f"The data in {name!r} was prepared by an older version of atlasjax: the ends of its documents have no "
                "checksum, and only their order is checked. Prepare it again to have one."
            )
        totals = manifest.totals(split)
        # Weighted by place, so that files in another order are another set.
        checksum = sum((i + 1) * file.crc32 for i, (_, file) in enumerate(mine)) % 2**32
        digest = f"{totals['documents']} documents, {totals['tokens']} tokens, {checksum:08x}"
        sets.append(PreparedSplit(TokenFiles(mine, manifest.token_dtype, manifest.vocab_size), digest))
    return TokenFiles(files, manifest.token_dtype, manifest.vocab_size), sets


def _check(name: str, manifest: Manifest, config: DataConfig, tokenizer: Tokenizer, split: Split) -> None:
    if manifest.fingerprint not in (tokenizer.fingerprint, tokenizer.former_fingerprint):
        raise ValueError(
            f"The data in {name!r} was prepared with another tokenizer ({manifest.source['tokenizer']!r}, {manifest.vocab_size} "
            f"tokens, SHA-256 {manifest.fingerprint[:12]}…) than the run's ({tokenizer.vocab_size} tokens, "
            f"{tokenizer.fingerprint[:12]}…)."
        )
    if manifest.packing != config.packing:
        raise ValueError(
            f"packing is {config.packing!r}, but the data in {name!r} was prepared for packing {manifest.packing!r}: its "
            f"documents end with {'the' if manifest.separator else 'no'} separator. Use --data.packing {manifest.packing}."
        )
    if manifest.packing == "contiguous" and manifest.separator != config.separator:
        raise ValueError(
            f"separator is {config.separator!r}, but the data in {name!r} was prepared with {manifest.separator!r}."
        )
    if split not in manifest.splits:
        raise ValueError(
            f"The data in {name!r} was prepared without validation data. Use --data.validation-fraction 0 to train without it, or "
            "prepare the data with validation data."
        )


def load_tokens(config: DataConfig, tokenizer: Tokenizer, split: Split) -> np.ndarray:
    """A whole split as one stream: its tokens, and below them the bytes of text that each represents, int32 [2, num_tokens].

    Raises as `open_prepared` or `load_documents`.
    """
    if config.source != "prepared":
        return token_stream(load_documents(config, split), tokenizer, config.separator, sized=True)
    found = open_prepared(config, tokenizer, split)[0][:]
    return found.astype(np.int32) if found.ndim == 2 else with_sizes(tokenizer, found)


def decoded(config: DataConfig, tokenizer: Tokenizer, split: Split) -> Iterator[str]:
    """The text of a split of prepared data in pieces, as its tokens give it: without what the tokenizer drops of a text.

    Raises as `open_prepared`.
    """
    tokens = open_prepared(config, tokenizer, split)[0]
    for number in range(tokens.num_documents):
        start, end = tokens.document(number)
        for at in range(start, end, _DECODED):  # a character is cut where a document has more tokens than that
            ids = tokens[at : min(at + _DECODED, end)]
            yield tokenizer.decode((ids[0] if ids.ndim == 2 else ids).tolist())


def identity(config: DataConfig, sets: list[PreparedSplit]) -> dict[str, object]:
    """The part of a pipeline's identity that prepared data has."""
    return {"weights": list(config.weights), "sets": [each.digest for each in sets]}
