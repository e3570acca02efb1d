"""A claim of a paper, and what decides it."""

import dataclasses
from collections.abc import Callable

from experiments.evidence.sources import Line


@dataclasses.dataclass(frozen=True)
class Direction:
    """A claim of a paper.

    Attributes:
      name: the claim.
      paper: where it is.
      lines: its comparisons, from the rows that exist.
      experiments: keys of `directions.EXPERIMENTS` that have, or would have, its rows.
      note: what a reader must know.
      depends: one sentence on what the verdict depends, read from the decided lines; "" if they agree.
    """

    name: str
    paper: str
    lines: Callable[[], list[Line]]
    experiments: tuple[str, ...]
    note: Callable[[], str] = lambda: ""
    depends: str = ""
