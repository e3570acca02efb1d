"""Looking a name up in a table, with a suggestion when it is not there."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return `table[name]`.

    Args:
      kind: what the name names, for the message ("preset", "memory rule", …).
      name: the name asked for.
      table: every known name and what it stands for.

    Raises:
      ValueError: `name` is not in the table; the message suggests the nearest name and lists all of them.
    """
    if name in table:
        return table[name]
    close = difflib.get_close_matches(str(name), table, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(sorted(table))}.")
