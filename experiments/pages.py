"""Figures, tables, and pages with a figure beside them, made from rows."""

import pathlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from experiments.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float) -> "Figure":
    """An empty figure. It draws to a file, whatever display there is or is not: pyplot would choose one for the whole process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def line(cells: Iterable[object]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def number(x: float) -> str:
    """Three digits, or as many as there are before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]], left: Collection[int] = (0,)) -> list[str]:
    """The lines of a table in Markdown. left: the columns of text, from 0 or from the end; those of numbers end at the right."""
    text = {place % len(columns) for place in left}
    marks = ("---" if place in text else "---:" for place in range(len(columns)))
    return [line(columns), line(marks), *map(line, rows)]


def write(
    path: pathlib.Path, text: str, rows: list[Row], plot: Callable[[list[Row], pathlib.Path], None] | None = None
) -> str:
    """Writes the page <path>.md, and the plot of the rows, if there is one, to <path>.png. Returns the page."""
    path.with_suffix(".md").write_text(text)
    if plot is not None:
        plot(rows, path.with_suffix(".png"))
    return text
