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


def ending(tokenizer: Tokenizer, separator: str) -> tuple[str, np.ndarray]:
    """The end of a document in a contiguous stream: text, and the tokens after it, int32 [n].

    All of a separator is text, except from the first name of a control token in it on.
    """
    start = min((separator.index(name) for name in tokenizer.control_tokens if name in separator), default=None)
    if start is None:
        return separator, np.zeros(0, np.int32)
    return separator[:start], tokenizer.encode_controlled(separator[start:])


def with_sizes(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Tokens [n], and below them the bytes of each if it has the same ones in every text: int32 [2, n]."""
    return np.stack([ids.astype(np.int32), tokenizer.bytes_per_token[ids]])


def token_stream(documents: Documents, tokenizer: Tokenizer, separator: str, *, sized: bool = False) -> np.ndarray:
    """Tokenize all documents, joined by `separator`.

    Returns:
      Token ids [num_tokens], in the smallest unsigned dtype that holds the vocabulary; or with `sized` the ids and the bytes of
      text that each represents, int32 [2, num_tokens].
    """
    dtype = np.dtype(np.int32) if sized else token_dtype(tokenizer.vocab_size)
    last = len(documents) - 1
    text, control = ending(tokenizer, separator)
    after = (with_sizes(tokenizer, control) if sized else control).astype(dtype)
    pieces = []
    for i in range(len(documents)):
        pieces.append(encode_text(tokenizer, documents[i] + (text if i < last else ""), dtype, sized=sized))
        if i < last and len(control):
            pieces.append(after)
    return np.concatenate(pieces, axis=-1) if pieces else np.zeros((2, 0) if sized else 0, dtype)


class TokenStream(Protocol):
    """A stream of token ids, from an array or files. A slice is [n]; or [2, n], with the bytes of each token below."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> np.ndarray: ...


class SizedTokens:
    """A stream of tokens with their bytes.

    Args:
      tokens: integers [2, num_tokens].
    """

    def __init__(self, tokens: np.ndarray):
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens.shape[1]

    def __getitem__(self, places: slice, /) -> np.ndarray:
        return self._tokens[:, places]


class Windows:
    """Windows of a token stream: window i predicts tokens i T + 1 to i T + T, where T = sequence_length.

    Every token except the first is a target exactly once. The last window is padded with tokens and weights of 0. Windows of zero
    weights are added until the number of windows is a multiple of `multiple`.

    An item is {"inputs": int32 [T], "targets": int32 [T], "weights": float32 [T]}, and for a stream with bytes also
    {"bytes": int32 [T]}, of the targets.
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
        window, *sizes = np.atleast_2d(self._tokens[index * length : (index + 1) * length + 1])
        count = max(0, len(window) - 1)
        inputs, targets = np.zeros(length, np.int32), np.zeros(length, np.int32)
        inputs[:count], targets[:count] = window[:count], window[1 : count + 1]
        batch = {"inputs": inputs, "targets": targets, "weights": (np.arange(length) < count).astype(np.float32)}
        if sizes:
            batch["bytes"] = np.zeros(length, np.int32)
            batch["bytes"][:count] = sizes[0][1 : count + 1]
        return batch
