"""Which texts begin alike, so that their beginning is read once."""

import collections
from collections.abc import Sequence

import numpy as np


def shared_beginnings(rows: Sequence[np.ndarray], piece: int, least: int) -> list[tuple[int, list[int]]]:
    """Groups texts by the longest beginning that at least `least` of them share.

    Args:
      rows: integers [time] each.
      piece: a beginning has a multiple of so many tokens, and is shorter than its text.
      least: a beginning that fewer texts share does not count.

    Returns:
      (number of tokens that the texts of a group share, their indices in `rows`). 0 tokens: those that share none.
    """
    names: dict[tuple[int, bytes], int] = {}  # (name of a beginning, the piece after it) → name of both together
    paths = []
    for row in rows:
        path = [0]
        for start in range(0, (len(row) - 1) // piece * piece, piece):
            path.append(names.setdefault((path[-1], row[start : start + piece].tobytes()), len(names) + 1))
        paths.append(path)
    counts = collections.Counter(name for path in paths for name in path[1:])
    groups: dict[tuple[int, int], list[int]] = {}
    for index, path in enumerate(paths):
        depth = sum(counts[name] >= least for name in path[1:])  # a longer beginning is shared by no more texts
        groups.setdefault((depth * piece, path[depth]), []).append(index)
    return [(length, members) for (length, _), members in groups.items()]
