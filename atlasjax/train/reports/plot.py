"""Plots the training loss and held-out bits per byte of a run against tokens."""

import io
from typing import TYPE_CHECKING, Any

from atlasjax import storage
from atlasjax.train.reports import metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def import_matplotlib() -> None:
    """Imports what `plot_loss` needs, which takes a second, and more on a machine where matplotlib looks for fonts first."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def plot_loss(
    run_dir: str | storage.AnyPath, title: str = "", references: dict[str, float] | None = None
) -> storage.AnyPath:
    """Plots a run's metrics.jsonl to loss_curve.png.

    Args:
      run_dir: the run's folder.
      title: title of the figure.
      references: bits per byte of other models on the same held-out text, drawn as horizontal lines.

    Returns:
      The path of the figure.

    Raises:
      ValueError: nothing has been recorded yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run_dir = storage.path(run_dir)
    records = metrics.read(run_dir / "metrics.jsonl")
    train = [record for record in records if record["kind"] == "train"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    if not train:
        raise ValueError(f"{run_dir / 'metrics.jsonl'} has no training records to plot.")
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)  # draws to a file, with or without a display
    left, right = figure.subplots(1, 2)
    _draw(left, train, "loss", "training loss (nats per token)", marker="")
    if evaluations:
        _draw(right, evaluations, "bits_per_byte", "held-out bits per byte", marker="o")
        for style, (name, value) in zip(("--", ":", "-.") * 4, (references or {}).items()):
            right.axhline(value, color="0.4", linestyle=style, linewidth=1, label=f"{name}: {value:.2f}")
        right.legend(fontsize="small")
    else:
        right.text(0.5, 0.5, "no evaluation was recorded", ha="center", transform=right.transAxes)
    figure.suptitle(title)
    path = run_dir / "loss_curve.png"
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    storage.write_whole(path, drawn.getvalue())
    return path


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _draw(axes: "Axes", records: list[dict[str, Any]], name: str, label: str, marker: str) -> None:
    points = [
        (record["tokens_seen"], record[name])
        for record in records
        if _is_number(record.get(name)) and _is_number(record.get("tokens_seen"))
    ]
    axes.plot(*zip(*points), marker=marker, markersize=4, linewidth=1.2, color="tab:blue", label="this model")
    axes.set_xlabel("training tokens")
    axes.set_ylabel(label)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 5))
    axes.grid(alpha=0.3)
