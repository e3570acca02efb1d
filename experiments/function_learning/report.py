"""Table and figures from the rows of `results.jsonl`."""

import pathlib
from collections.abc import Iterable

from experiments.function_learning.results import BLOCK, LAST, Row

TITLES = {
    "low_rank": "1  low-rank map",
    "mlp": "2  MLP",
    "attention_mlp": "3  attention, then MLP",
    "attention_as_input": "4  attention's output as input",
    "window_attention_mlp": "5  window attention, then MLP",
}
NAMES = {"sgd": "SGD", "rmsprop": "RMSprop", "adam": "Adam", "muon": "Muon"}
# Colors that are distinguishable with color blindness and ordered in lightness, each with its own dash pattern, readable in gray.
LINES = {
    "sgd": ("#E69F00", (0, (1, 1.2))),
    "rmsprop": ("#56B4E9", (0, (5, 1.5))),
    "adam": ("#0072B2", "solid"),
    "muon": ("#1A1A1A", (0, (4, 1.2, 1, 1.2))),
}
REFERENCE = f"mean of the last {BLOCK} outputs"
LOWEST, HIGHEST = 0.005, 3.0  # range of losses shown in a panel


def _where(rows: Iterable[Row], **wanted) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def _present(rows: Iterable[Row], *names: str) -> list[tuple]:
    """Distinct values, in order of first appearance."""
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def _number(x: float | None) -> str:
    return "diverged" if x is None else f"{x:.3f}" if x < 10 else f"{x:.0f}"


def _spread(rows: list[Row]) -> str:
    """Mean over seeds, with the lowest and highest value."""
    values = [row["last"] for row in rows]
    if not values:
        return ""
    if None in values:
        return f"diverged in {values.count(None)} of {len(values)}"
    return f"{_number(sum(values) / len(values))} ({_number(min(values))}–{_number(max(values))})"


def _loss(row: Row) -> float:
    return float("inf") if row["last"] is None else row["last"]


def _seeds_lower(rows_a: list[Row], rows_b: list[Row]) -> tuple[int, int]:
    """(number of common seeds in which the first rows have the lower loss, number of common seeds)."""
    b = {row["seed"]: row for row in rows_b}
    pairs = [(_loss(row), _loss(b[row["seed"]])) for row in rows_a if row["seed"] in b]
    return sum(x < y for x, y in pairs), len(pairs)


def _table(rows: list[Row], references: list[Row]) -> list[str]:
    """Table of settings (rows) and optimizers (columns) for one shape and width."""
    optimizers = [name for name in NAMES if _where(rows, optimizer=name)]
    lines = ["| mapping | " + " | ".join(NAMES[n] for n in optimizers) + f" | mean of last {BLOCK} outputs |"]
    lines.append("|---|" + "---|" * (len(optimizers) + 1))
    for setting, title in TITLES.items():
        cells = []
        for name in optimizers:
            found = _where(rows, setting=setting, optimizer=name)
            rates = " ".join(f"{rate:g}" for (rate,) in _present(found, "learning_rate"))
            cells.append(f"{_spread(found)} at {rates}" if found else "")
        reference = _where(references, setting=setting)
        if any(cells):
            lines.append(f"| {title} | " + " | ".join(cells) + f" | {_spread(reference)} |")
    return lines


def _orders(rows: list[Row]) -> list[str]:
    """Two orders that the paper reports, counted over seeds."""
    lines = ["| memory | optimizer | 3 easier than 5 | 4 easier than 2 |", "|---|---|---|---|"]
    for dim, hidden, expansion in _present(rows, "dim", "hidden_layers", "expansion"):
        shape = _where(rows, dim=dim, hidden_layers=hidden, expansion=expansion)
        for name in (n for n in NAMES if _where(shape, optimizer=n)):
            cells = []
            for easier, harder in (("attention_mlp", "window_attention_mlp"), ("attention_as_input", "mlp")):
                of = lambda setting, name=name, shape=shape: _where(shape, optimizer=name, setting=setting)
                lower, seeds = _seeds_lower(of(easier), of(harder))
                cells.append(f"{lower} of {seeds}")
            lines.append(f"| d = {dim}, {hidden} hidden, {expansion}x | {NAMES[name]} | {' | '.join(cells)} |")
    return lines


def _winners(rows: list[Row]) -> list[str]:
    """The optimizer with the lowest loss for each seed, as a table of shapes (rows) and settings (columns)."""
    lines = ["| memory | " + " | ".join(TITLES.values()) + " |", "|---|" + "---|" * len(TITLES)]
    for dim, hidden, expansion in _present(rows, "dim", "hidden_layers", "expansion"):
        shape = _where(rows, dim=dim, hidden_layers=hidden, expansion=expansion)
        cells = []
        for setting in TITLES:
            found = _where(shape, setting=setting)
            seeds = sorted({row["seed"] for row in found})
            best = [min(_where(found, seed=seed), key=_loss)["optimizer"] for seed in seeds]
            names = list(dict.fromkeys(best))
            cells.append(NAMES[names[0]] if len(names) == 1 else ", ".join(NAMES[n] for n in best))
        lines.append(f"| d = {dim}, {hidden} hidden, {expansion}x | {' | '.join(cells)} |")
    return lines


def table(rows: list[Row]) -> str:
    """The mean loss of the last tokens for every width and shape, and the orders by number of seeds, as Markdown."""
    runs = _where(rows, kind="run")
    lines = ["Generated by `run.py`; not written by hand.", ""]
    lines += [f"‖M(i_j) − o_j‖² / ‖o_j‖² before token j's step, mean over the last {LAST} tokens: mean over seeds"]
    lines += ["(lowest–highest) at the learning rate that the sweep chose. 1 is what M = 0 has."]
    for dim, length, hidden, expansion in _present(runs, "dim", "length", "hidden_layers", "expansion"):
        size = {"dim": dim, "length": length}
        of_shape = _where(runs, **size, hidden_layers=hidden, expansion=expansion)
        seeds = len({row["seed"] for row in of_shape})
        lines += ["", f"## d = {dim}, {length:,} tokens, {hidden} hidden layers, {expansion}x; {seeds} seeds", ""]
        lines += _table(of_shape, _where(rows, kind="reference", **size))
    lines += ["", "## Orders of settings: in how many seeds", "", *_orders(runs)]
    lines += ["", "## The optimizer with the lowest loss", "", "One name where it is the same for every seed.", ""]
    lines += [*_winners(runs), ""]
    return "\n".join(lines)


def _draw_curve(axes, rows: list[Row], label: str, color: str, dash, width: float, band: bool) -> None:
    import numpy as np

    # A diverged block is a gap in the line.
    curves = np.array([[np.nan if v is None else v for v in row["curve"]] for row in rows], dtype=float)
    begin = BLOCK if rows[0]["kind"] == "reference" else 0  # the reference starts after BLOCK tokens
    position = begin + BLOCK * (np.arange(curves.shape[1]) + 0.5)
    axes.plot(position, curves.mean(axis=0), color=color, linestyle=dash, linewidth=width, label=label)
    if band:
        axes.fill_between(position, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.18, linewidth=0)


def figure(rows: list[Row], dim: int, length: int, path: pathlib.Path) -> None:
    """Plots loss against position: one row of panels per memory shape, one panel per setting, one line per optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = {"dim": dim, "length": length}
    runs, references = _where(rows, kind="run", **size), _where(rows, kind="reference", **size)
    shapes = sorted(_present(runs, "hidden_layers", "expansion"), key=lambda s: (s[1], s[0]))
    settings = [name for name in TITLES if _where(runs, setting=name)]
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        grid = (len(shapes), len(settings))
        inches = (2.6 * grid[1] + 0.6, 2.15 * grid[0] + 0.9)
        chart, panels = pyplot.subplots(*grid, figsize=inches, sharex=True, sharey=True, squeeze=False)
        handles: dict[str, object] = {}
        for down, (hidden, expansion) in enumerate(shapes):
            for across, setting in enumerate(settings):
                axes = panels[down][across]
                axes.axhline(1.0, color="0.75", linewidth=0.8, zorder=0)
                reference = _where(references, setting=setting)
                if reference:
                    _draw_curve(axes, reference, REFERENCE, "0.55", (0, (1, 2.5)), 1.2, False)
                for name, (color, dash) in LINES.items():
                    found = _where(runs, hidden_layers=hidden, expansion=expansion, setting=setting, optimizer=name)
                    if found:
                        _draw_curve(axes, found, NAMES[name], color, dash, 1.6, True)
                handles.update((h.get_label(), h) for h in axes.get_lines() if not h.get_label().startswith("_"))
                if down == 0:
                    axes.set_title(TITLES[setting], fontsize=10, loc="left")
                if across == 0:
                    axes.set_ylabel(f"{hidden} hidden layers, {expansion}x\nrelative squared error")
                if down == grid[0] - 1:
                    axes.set_xlabel("position (tokens)")
        panels[0][0].set(yscale="log", ylim=(LOWEST, HIGHEST), xlim=(0, length))
        panels[0][0].set_yticks([0.01, 0.03, 0.1, 0.3, 1, 3], ["0.01", "0.03", "0.1", "0.3", "1", "3"])
        panels[0][0].set_yticks([], minor=True)
        order = [name for name in (*NAMES.values(), REFERENCE) if name in handles]
        chart.legend([handles[n] for n in order], order, loc="upper center", ncols=len(order), frameon=False)
        chart.tight_layout(rect=(0, 0, 1, 1 - 0.4 / inches[1]))
        chart.savefig(path, dpi=130)
        pyplot.close(chart)


def write(rows: list[Row], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes table.md and one figure per width, loss_d<width>.png, if there is a finished run. Returns their paths."""
    runs = _where(rows, kind="run")
    if not runs:
        return []
    paths = [folder / "table.md"]
    paths[0].write_text(table(rows))
    for dim, length in _present(runs, "dim", "length"):
        same_dim = len({n for d, n in _present(runs, "dim", "length") if d == dim}) == 1
        paths.append(folder / (f"loss_d{dim}.png" if same_dim else f"loss_d{dim}_t{length}.png"))
        figure(rows, dim, length, paths[-1])
    return paths
