"""The packed rows: every case in which a document could read another one, or its padding."""

import dataclasses
from collections.abc import Iterator

import numpy as np

# Each row: (length, id) of its segments, in order; ids of padding are negative here.
ROWS: dict[str, tuple[tuple[int, int], ...]] = {
    "empty segments, and segments of one token": ((1, 0), (1, 1), (8, 5), (13, 6), (2, 9), (23, 12), (22, 40)),
    "ids that return": ((16, 5), (7, 2), (24, 5), (1, 0), (9, 7), (13, 2)),
    "left padding": ((37, -1), (33, 1)),
    "left padding, one token": ((69, -1), (1, 1)),
    "left padding of whole chunks": ((64, -1), (6, 1)),
    "right padding": ((50, 1), (20, -1)),
    "padding on both sides": ((11, -1), (40, 1), (19, -1)),
}
TIME = 70
PADDING = 0  # the id of padding


@dataclasses.dataclass(frozen=True)
class Document:
    """Where a document stands: tokens [start, start + length) of a packed row. `number` is its row in `documents`."""

    number: int
    row: int
    start: int
    length: int


def documents() -> list[Document]:
    """All documents of all rows."""
    return list(_documents())


def _documents() -> Iterator[Document]:
    number = 0
    for row, segments in enumerate(ROWS.values()):
        start = 0
        for length, segment in segments:
            if segment >= 0:
                yield Document(number, row, start, length)
                number += 1
            start += length


def is_padded(document: Document) -> bool:
    """Whether its row has padding, and no other document."""
    return any(segment < 0 for _, segment in list(ROWS.values())[document.row])


def packed(tokens: np.ndarray, padding: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The packed tokens and segment ids, int32 [rows, TIME].

    Args:
      tokens: the documents, int32 [documents, TIME], of which as many tokens are taken as fit.
      padding: what stands where no document does, int32 [rows, TIME].
    """
    found = padding.copy()
    for document in documents():
        here = slice(document.start, document.start + document.length)
        found[document.row, here] = tokens[document.number, : document.length]
    ids = [np.repeat([max(i, PADDING) for _, i in row], [n for n, _ in row]) for row in ROWS.values()]
    return found, np.stack(ids).astype(np.int32)
