"""Plots of `kernels_tpu.py plot`: the roofline of the kernels, and the figure of `docs/kernels.md`."""

import pathlib
from typing import Any

from experiments import pages
from experiments.benchmarks.kernel_cases import Case
from experiments.benchmarks.kernel_report import Row, kernel_cycles
from experiments.benchmarks.tpu_static import CHIPS

_COLORS = {
    "newton_schulz": "tab:red",
    "delta_rule": "tab:green",
    "linear_rule": "tab:purple",
    "chunk_memory": "tab:blue",
}


DIMS = (64, 128)  # more points would overlap


def points(found: dict[str, Row]) -> list[tuple[str, str, str, bool, float, float]]:
    """One point per kernel of DIMS: name, operation, type, whether it is the backward kernel, operations per byte of HBM, FLOP/s.

    Operations are those of the products, each counted once. Bytes are those of the arrays as the compiled program stores them.
    """
    found_points = []
    for row in found.values():
        case, chip = Case(**row["case"]), CHIPS[row["topology"]]
        if "error" in row or case.operation not in _COLORS or case.dim not in DIMS or not row["kernels"]:
            continue
        kernel = row["kernels"][-1]
        operations = kernel["operations"] * kernel["steps"]
        rate = operations / (kernel_cycles(row, kernel) / chip.clock)
        chunk = f" b{case.chunk}" if case.chunk != 64 else ""
        name = f"{case.operation} {case.variant.replace('_', ' ')} {case.dim}{chunk}"
        found_points.append(
            (name, case.operation, case.dtype, case.direction == "both", operations / kernel["array_bytes"], rate)
        )
    return sorted(found_points)


def roofline(found: dict[str, Row], topology: str, path: pathlib.Path) -> None:
    """Plots the rate according to the compiler's schedule against operations per byte, with numbered points and a legend."""
    import numpy as np
    from matplotlib.lines import Line2D

    chip = CHIPS[topology]
    figure, (*plots, names) = figure_of((15, 7), 1, 3, width_ratios=[3, 3, 1.5])
    known = points(found)
    numbers = {name: i for i, name in enumerate(sorted({x[0] for x in known}), 1)}
    left, right = 16, 2048
    bottom = min([chip.flops / 100, *(x[-1] / 1.5 for x in known)])
    intensity = np.geomspace(left, right, 200)
    for axes, dtype, passes in zip(plots, ("bfloat16", "float32"), (1, 6), strict=True):
        peak = chip.flops / passes
        axes.plot(intensity, np.minimum(chip.bandwidth * intensity, peak), color="black", linewidth=1.2)
        words = "bfloat16 products" if passes == 1 else "exact float32 products: a sixth, six passes each"
        axes.text(right * 0.95, peak * 1.05, f"{peak / 1e12:.3g} TFLOP/s", ha="right", fontsize=8)
        axes.text(left * 1.05, chip.bandwidth * left * 0.8, f"{chip.bandwidth / 1e9:.0f} GB/s", fontsize=8, va="top")
        axes.set_title(words, fontsize=10)
        shown = [x for x in known if x[2] == dtype]
        for _, operation, _, backward, x, y in shown:
            axes.plot(x, y, "v" if backward else "o", color=_COLORS[operation], markersize=5)
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, chip.flops * 1.6))
        axes.set_xlabel("operations of the kernel's products per byte of HBM")
        axes.set_ylabel("FLOP/s")
        axes.grid(alpha=0.3, which="both")
        _number(axes, [(numbers[p[0]], p[4], p[5]) for p in shown])
    marks = [
        Line2D([], [], marker=m, color="gray", linestyle="", label=t) for m, t in (("o", "forward"), ("v", "backward"))
    ]
    plots[0].legend(handles=marks, fontsize=8, loc="upper left")
    names.axis("off")
    for i, name in enumerate(numbers):
        color = _COLORS[name.split()[0]]
        names.text(0, 1 - (i + 0.5) / max(len(numbers), 30), f"{numbers[name]:2d}  {name}", fontsize=8, color=color)
    note = "above the line: a schedule may begin products faster than the published peak"
    figure.suptitle(f"Kernels on {topology}: the compiler's static estimate, not a clock ({note})", fontsize=11)
    figure.savefig(path, dpi=110)


def _number(axes: Any, marked: list[tuple[int, float, float]]) -> None:
    """Writes the number of each point next to it, on the emptiest side. The axes' limits must already be set."""
    import numpy as np

    places = axes.transData.transform([(x, y) for _, x, y in marked]).reshape(-1, 2)
    taken = list(places)
    sides = [(9, 4), (9, -9), (-9, 4), (-9, -9), (0, 9), (0, -14)]  # offsets of the text's center, in points
    for (number, x, y), place in zip(marked, places, strict=True):
        shifts = [np.array(side) * axes.figure.dpi / 72 for side in sides]
        nearest = [min(np.hypot(*(place + shift - other)) for other in taken) for shift in shifts]
        best = int(np.argmax(np.minimum(nearest, 12)))  # distances beyond 12 count the same
        taken.append(place + shifts[best])
        text = {"textcoords": "offset points", "fontsize": 7, "ha": "center", "va": "baseline"}
        axes.annotate(str(number), (x, y), sides[best], **text)


def figure_of(size: tuple[float, float], rows: int, columns: int, **ratios: Any) -> tuple[Any, Any]:
    figure = pages.figure(*size)
    return figure, figure.subplots(rows, columns, **ratios)


def grid_figure(path: pathlib.Path) -> None:
    """Shows how `chunk_scan` processes the chunks of a group of heads, forward and backward, and where data is stored."""
    figure, (forward, backward) = figure_of((11, 8), 2, 1)
    read, written = [("$C_{i}$", -0.5), ("$x_{i}$", 0.0), ("$dy_{i}$", 0.5)], [("$y_{i}$", -0.35), ("$C_{i}$", 0.35)]
    _walk(forward, "forward", read[1:2], written, "first carry $C_0$", "final carry", 1)
    _walk(backward, "backward", read, [("$dx_{i}$", 0.0)], "$d$ final carry", "$d$ first carry", -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _walk(
    axes: Any, title: str, below: list[tuple[str, float]], above: list[tuple[str, float]],
    first: str, last: str, step: int,
) -> None:  # fmt: skip
    """One kernel: HBM above and below, vector memory in between, and the grid's steps from left to right or in reverse."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    pitch, width, count = 3.0, 1.9, 4
    right = pitch * (count - 1)
    for shift in (0.24, 0.12):  # more groups
        axes.add_patch(Rectangle((-2.6 + shift, -0.95 + shift), right + 5.2, 1.9, facecolor="white", edgecolor="0.7"))
    axes.add_patch(Rectangle((-2.6, -0.95), right + 5.2, 1.9, facecolor="#eef3fb", edgecolor="tab:blue"))
    for y, words in ((-2.5, "HBM: read, one block for each step"), (2.0, "HBM: written, one block for each step")):
        axes.add_patch(Rectangle((-2.6, y), right + 5.2, 0.75, facecolor="#f4f4f4", edgecolor="0.5"))
        axes.text(-2.5, y + (0.82 if y > 0 else -0.12), words, fontsize=9, va="bottom" if y > 0 else "top", color="0.3")
    arrow = {"arrowstyle": "->", "color": "black", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    scratch = arrow | {"color": "tab:blue", "linewidth": 2.4}
    work = "C, x → C, y" if step > 0 else "once more,\nthen its VJP"
    for i in range(count):
        x = pitch * i
        axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, -0.6), width, 1.2, boxstyle="round,pad=0.02", facecolor="white", edgecolor="tab:blue"
            )
        )
        order = i if step > 0 else count - 1 - i
        axes.text(x, 0.28, f"chunk {i}", ha="center", va="center", fontsize=10)
        axes.text(x, -0.08, work, ha="center", va="center", fontsize=8.5)
        axes.text(x, -0.46, f"step {order}", ha="center", va="center", fontsize=7.5, color="0.4")
        for words, shift in below:
            axes.annotate("", (x + shift, -0.62), (x + shift, -1.75), arrowprops=arrow)
            axes.text(x + shift, -2.12, words.replace("{i}", f"{{{i}}}"), ha="center", va="center", fontsize=11)
        for words, shift in above:
            axes.annotate("", (x + shift, 2.0), (x + shift, 0.62), arrowprops=arrow)
            axes.text(x + shift, 2.37, words.replace("{i}", f"{{{i}}}"), ha="center", va="center", fontsize=11)
    ends = [-2.55, *(pitch * i for i in range(count)), right + 2.55]
    for i in range(count + 1):
        start = ends[i] + (width / 2 if i > 0 else 0.0)
        stop = ends[i + 1] - (width / 2 if i < count else 0.0)
        axes.annotate("", *((stop, 0), (start, 0)) if step > 0 else ((start, 0), (stop, 0)), arrowprops=scratch)
    begin, end = (first, last) if step > 0 else (last, first)
    axes.text(-2.5, 0.15, begin, fontsize=9, va="bottom")
    axes.text(right + 2.55, 0.15, end, fontsize=9, va="bottom", ha="right")
    axes.text(-2.5, 0.7, "VMEM of a group", fontsize=9, color="tab:blue", va="bottom")
    carried = "C" if step > 0 else "dC"
    axes.text(pitch / 2, -0.12, f"{carried}, in\nscratch", fontsize=8, color="tab:blue", va="top", ha="center")
    axes.set(xlim=(-2.9, right + 3.1), ylim=(-3.1, 3.2))
    axes.set_title(
        f"{title}: batch × groups of heads (in parallel) × chunks (in {'order' if step > 0 else 'reverse order'})",
        fontsize=11,
    )
    axes.axis("off")
