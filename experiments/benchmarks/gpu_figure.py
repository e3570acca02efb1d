"""Draws the GPU figure of `docs/kernels.md`.

    python experiments/benchmarks/gpu_figure.py

Replaces the image in `docs/figures`, or that of `--out`.
"""

import argparse
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks.kernel_plots import figure_of

PATH = pathlib.Path(__file__).parents[2] / "docs" / "figures" / "gpu_chunks.png"
_PITCH, _WIDTH, _COUNT = 3.0, 2.1, 4


def draw(path: pathlib.Path) -> None:
    """Shows which part of a row's chunks is a sequential kernel, and which part XLA computes for all chunks at once."""
    figure, (forward, backward) = figure_of((11, 7.6), 2, 1)
    _panel(
        forward, "forward", 1,
        [
            "tokens $k_{i}$, $v_{i}$\ngates → weights at the end",
            "$M_{i}$, $S_{i}$ → $M_{n}$, $S_{n}$",
            "$y_{i}$ = reads of $M_{i}$, $S_{i}$",
        ],
        ["$k_{i}$, $v_{i}$, $C_{i}$", "$M_{i}$, $S_{i}$ kept"],
    )  # fmt: skip
    _panel(
        backward, "backward", -1,
        [
            "$dq_{i}$ and ext$_{i}$ from $dy_{i}$\n(transposed reads)",
            "$G_{n}$ → $G_{i}$",
            "$dk_{i}$, $dv_{i}$, $d$gates from $G_{n}$\n(transposed writes)",
        ],
        ["ext$_{i}$, $M_{i}$", "$G_{n}$"],
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=PATH, help="the image to write")
    args = parser.parse_args()
    draw(args.out)
    print(f"wrote {args.out}")


def _panel(axes: Any, title: str, step: int, work: list[str], between: list[str]) -> None:
    """Three bands, from bottom to top: XLA, the kernel, XLA."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    right = _PITCH * (_COUNT - 1)
    arrow = {"arrowstyle": "->", "color": "black", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    chain = arrow | {"color": "tab:blue", "linewidth": 2.4}
    names = ("XLA: all chunks at once", "kernel: chunks in " + ("order" if step > 0 else "reverse"))
    for level, name in enumerate((*names, names[0])):
        y, kernel = 2.1 * level, level == 1
        face, edge = ("#eef3fb", "tab:blue") if kernel else ("#f4f4f4", "0.5")
        axes.add_patch(Rectangle((-1.4, y - 0.62), right + 2.8, 1.5, facecolor=face, edgecolor=edge))
        axes.text(0.15, y + 0.62, name, fontsize=9, color=edge if kernel else "0.3", va="center")
        for i in range(_COUNT):
            box = (i * _PITCH - _WIDTH / 2, y - 0.42)
            style = {"facecolor": "white", "edgecolor": edge}
            axes.add_patch(FancyBboxPatch(box, _WIDTH, 0.78, boxstyle="round,pad=0.02", **style))
            words = work[level].replace("{i}", f"{{{i}}}").replace("{n}", f"{{{i + 1}}}")
            axes.text(i * _PITCH, y - 0.03, words, ha="center", va="center", fontsize=8.5)
        if kernel:
            ends = [-1.35, *(_PITCH * i for i in range(_COUNT)), right + 1.35]
            for i in range(_COUNT + 1):
                start = ends[i] + (_WIDTH / 2 if i > 0 else 0.0)
                stop = ends[i + 1] - (_WIDTH / 2 if i < _COUNT else 0.0)
                axes.annotate("", *((stop, y), (start, y))[::step], arrowprops=chain)
    for level, label in enumerate(between):
        for i in range(_COUNT):
            x, low, high = i * _PITCH, 2.1 * level + 0.4, 2.1 * (level + 1) - 0.45
            axes.annotate("", (x, high), (x, low), arrowprops=arrow)
            words = label.replace("{i}", f"{{{i}}}").replace("{n}", f"{{{i + 1}}}")
            axes.text(x + 0.08, high - 0.28, words, fontsize=8, va="center")
    axes.set(xlim=(-1.6, right + 1.6), ylim=(-0.8, 5.2))
    axes.set_title(title, fontsize=11)
    axes.axis("off")


if __name__ == "__main__":
    main()
