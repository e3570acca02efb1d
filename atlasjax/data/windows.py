"""Contiguous packing: one long stream of tokens is cut into windows."""

from typing import Protocol

import numpy as np

from atlasjax.data.documents import Documents
from atlasjax.data.pieces import encode_text
from atlasjax.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype that holds every token id."""
    return np.min_scalar_type(vocab_size - 1)


def token_stream(documents: Documents, tokenizer: Tokenizer, separator: str) -> np.ndarray:
    """Tokenize all documents, joined by `separator`.

    Returns:
      Token ids [num_tokens], in the smallest unsigned dtype that holds the vocabulary.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    last = len(documents) - 1
    pieces = [
        encode_text(tokenizer, documents[i] + (separator if i < last else ""), dtype) for i in range(len(documents))
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


class TokenStream(Protocol):
    """A stream of token ids, from an array or files."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> np.ndarray: ...


class Windows:
    """Windows of a token stream: window i predicts tokens i T + 1 to i T + T, where T = sequence_length.

    Every token except the first is a target exactly once. The last window is padded with tokens and weights of 0. Windows of zero
    weights are added until the number of windows is a multiple of `multiple`.

    An item is {"inputs": int32 [T], "targets": int32 [T], "weights": float32 [T]}.
    """

    def __init__(self, tokens: TokenStream, sequence_length: int, multiple: int = 1):
        self._tokens = tokens
        self._sequence_length = sequence_length
        full_or_partial = -(-(len(tokens) - 1) // sequence_length)
        self._length = -(-full_or_partial // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        length = self._sequence_length
        window = self._tokens[index * length : (index + 1) * length + 1]
        count = max(0, len(window) - 1)
        inputs, targets = np.zeros(length, np.int32), np.zeros(length, np.int32)
        inputs[:count], targets[:count] = window[:count], window[1 : count + 1]
        return {"inputs": inputs, "targets": targets, "weights": (np.arange(length) < count).astype(np.float32)}
