"""Pictures of results: scores by length and depth, losses by position."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atlasjax.evaluate.long_context.task import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(results: Sequence[Result]) -> bytes:
    """A PNG of the results of one task: a heat map of length × depth, or lines if the task has no depths.

    Raises:
      ValueError: there are no results, or those of several tasks.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = {result.task for result in results}
    if len(tasks) != 1:
        raise ValueError(f"draw: the results are of {len(tasks)} tasks; they must be of one.")
    values = [value for result in results for value in result.values]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file, with or without a display
    axes = figure.subplots()
    if any(value.depth is not None for value in values):
        _heat_map(figure, axes, results)
    elif any(value.positions is not None for value in values):
        _by_position(axes, results)
    else:
        _by_length(axes, results)
    axes.set_title(tasks.pop())
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    return drawn.getvalue()


def _heat_map(figure: "Figure", axes: "Axes", results: Sequence[Result]) -> None:
    depths = [value.depth for value in results[0].values if value.depth is not None]
    rows = [[result.values[1 + i].metrics["score"] for result in results] for i in range(len(depths))]
    image = axes.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for y, row in enumerate(rows):
        for x, score in enumerate(row):
            axes.text(x, y, f"{score:.2f}", ha="center", va="center", color="black" if score > 0.6 else "white")
    axes.set_xticks(range(len(results)), [f"{result.length:,}" for result in results])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:g}%" for depth in depths])
    axes.set_xlabel("length (tokens, answer included)")
    axes.set_ylabel("depth of the answer")
    figure.colorbar(image, label="score")


def _by_position(axes: "Axes", results: Sequence[Result]) -> None:
    for result in results:
        parts = [value for value in result.values if value.positions is not None]
        edges = [value.positions[0] for value in parts] + [parts[-1].positions[1]]  # type: ignore[index]
        axes.stairs(
            [value.metrics["loss"] for value in parts], edges, baseline=None, label=f"{result.length:,}", lw=1.8
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position in the window (tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(title="window", fontsize="small")
    axes.grid(alpha=0.3)


def _by_length(axes: "Axes", results: Sequence[Result]) -> None:
    metric = next(iter(results[0].values[0].metrics))
    means = [result.values[0].metrics[metric] for result in results]
    errors = [0.0 if math.isnan(error := result.values[0].standard_error) else error for result in results]
    axes.errorbar([result.length for result in results], means, errors, marker="o", capsize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks([result.length for result in results], [f"{result.length:,}" for result in results])
    axes.minorticks_off()
    if metric == "score":
        axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel(f"{metric} (bars: standard error)")
    axes.grid(alpha=0.3)
