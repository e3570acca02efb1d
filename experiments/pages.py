"""Figures, and pages with a figure beside them, made from rows."""

import pathlib
from collections.abc import Callable
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


def write(path: pathlib.Path, text: str, rows: list[Row], plot: Callable[[list[Row], pathlib.Path], None]) -> str:
    """Writes the page <path>.md, and the plot of the rows to <path>.png. Returns the page."""
    path.with_suffix(".md").write_text(text)
    plot(rows, path.with_suffix(".png"))
    return text
