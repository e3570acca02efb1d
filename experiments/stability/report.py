"""Tables and plot of the stability experiments, from the existing rows."""

import pathlib
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from experiments import pages
from experiments.rows import read_rows
from experiments.stability.settings import CANDIDATES, EVERY, IN_TRAIN, RESULTS, STEPS, TABLE_7_RATE, TOKENS

GATES = ("retention", "step_size", "momentum_decay")


def _table(columns: list[str], lines: list[list[str]]) -> str:
    return "\n".join(pages.table(columns, lines, left=range(len(columns)))) + "\n"


def _scores(rows: list[dict[str, Any]]) -> str:
    """Bits per byte over seeds: the mean, with the lowest and highest of several, and the steps at which runs diverged."""
    fine = [row["bits_per_byte"] for row in rows if row["diverged_at"] is None]
    spread = f" ({min(fine):.3f} – {max(fine):.3f})" if len(fine) > 1 else ""
    parts = [f"{statistics.mean(fine):.3f}{spread}"] if fine else []
    parts += [f"NaN at {row['diverged_at']}" for row in rows if row["diverged_at"] is not None]
    return ", ".join(parts) or "–"


_CELLS = [
    "held-out bits per byte", "losses above the unigram's after step 50", "largest memory", "α", "η", "θ", "spikes"
]  # fmt: skip
_LEGEND = (
    "Largest memory: ‖W‖_F / √rows at the end of the last batch's sequences. α, η, θ: smallest and largest on that batch. Spikes: "
    "steps after the 50th whose gradient norm is more than ten times the median.\n\n"
)


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    """The cells of `_CELLS` of runs that differ in the seed."""
    ends = {name: [end for row in rows for end in (row.get("gates") or {}).get(name, [])] for name in GATES}
    norms = [row["weight_norm"] for row in rows if row.get("weight_norm") is not None]
    return [
        _scores(rows),
        str(sum(row["above_unigram"] for row in rows)),
        f"{max(norms):.2f}" if norms else "–",
        *(f"{min(values):.3g} – {max(values):.3g}" if values else "–" for values in ends.values()),
        str(sum(row["spikes"] for row in rows)),
    ]


def _diverged(rows: list[dict[str, Any]]) -> int:
    return sum(row["diverged_at"] is not None for row in rows)


def train_table(rows: list[dict[str, Any]]) -> str:
    bounded = [row for row in rows if row["bounded"]]
    grouped = defaultdict(list)
    for row in bounded:
        grouped[row["preset"], row["text"]].append(row)
    lines = [[*key, str(len(group)), *_cells(group)] for key, group in sorted(grouped.items())]
    return (
        f"{len(bounded)} runs of tiny presets at their defaults, {_diverged(bounded)} diverged. "
        + _LEGEND
        + _table(["preset", "text", "seeds", *_CELLS], lines)
    )


def wide_table(rows: list[dict[str, Any]]) -> str:
    rate = lambda row: f"{row['times_the_rate'] * TABLE_7_RATE:g}"
    lines = [[row["preset"], rate(row), *_cells([row])] for row in rows]
    return (
        f"{len(rows)} runs of two layers as wide as those of the 340M models, {STEPS} steps of {TOKENS} bytes of the embedded "
        f"text, in bfloat16, {_diverged(rows)} diverged. {_LEGEND}".rstrip()
        + "".join(f" Memories of {name} write once every {every} tokens." for name, every in EVERY.items())
        + "\n\n"
        + _table(["preset", "learning rate", *_CELLS], sorted(lines))
    )


def compared_table(rows: list[dict[str, Any]]) -> str:
    """Compares the bounded rule with the papers' recurrence, on the seeds that both have."""
    grouped: dict[tuple[str, str], dict[bool, dict[int, Any]]] = defaultdict(lambda: {True: {}, False: {}})
    for row in rows:
        grouped[row["preset"], row["text"]][row["bounded"]][row["seed"]] = row
    lines = []
    for (preset, text), both in sorted(grouped.items()):
        seeds = sorted(both[True].keys() & both[False].keys())
        if seeds:
            pick = lambda bounded, both=both, seeds=seeds: [both[bounded][seed] for seed in seeds]
            lines.append([preset, text, str(len(seeds)), _scores(pick(False)), _scores(pick(True))])
    return _table(["preset", "text", "seeds", "without the bound", "with it"], lines)


def read_table(rows: list[dict[str, Any]]) -> str:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    by_rule: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        if row["case"] == "bfloat16":
            text = f"{100 * row['difference']:.2f} %"
        elif not row["finite"]:
            text = "not finite"
        else:
            text = f"{row['largest_weight_norm']:.3g}, {row['largest_output']:.3g}"
        if row["tokens"] == 16_384:
            text += " (16,384 tokens)"
        by_rule[row["rule"]][row["case"]] = text
    finite = sum(row["finite"] for row in rows)
    return (
        f"{finite} of {len(rows)} rows are finite. Each cell: the largest ‖W‖_F / √rows after any piece of 8,192 tokens, and the "
        "largest output; bfloat16: the largest difference from float32 over the largest output.\n\n"
        + _table(
            ["rule", *cases], [[rule, *(cells.get(case, "–") for case in cases)] for rule, cells in by_rule.items()]
        )
    )


def candidates_tables(rows: list[dict[str, Any]], trained: list[dict[str, Any]]) -> str:
    """trained: rows of `train.py`, which has the runs of two of the candidates."""
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        parts[row["task"]["part"]].append(row)
    text = ""
    names = list(CANDIDATES)
    if parts["stream"]:
        cells: dict[Any, dict[str, str]] = defaultdict(dict)
        for row in parts["stream"]:
            task = row["task"]
            shown = f"{row['norm']:g}, {row['largest_output']:g}" if row["finite"] else "not finite"
            cells[task["keys"], task["step_size"], task["momentum_decay"]][task["candidate"]] = shown
        lines = [[*map(str, key), *(c.get(name, "–") for name in names)] for key, c in cells.items()]
        text += "\n## Stability\n\n65,536 tokens, titans, one head of 16, α = 1, random values: the largest ‖W‖_F at the end, the "
        text += "largest output at a written key.\n\n" + _table(["keys", "η", "θ", *names], lines)
    if parts["capacity"]:
        recalled: dict[float, dict[str, str]] = defaultdict(dict)
        for row in parts["capacity"]:
            recalled[row["task"]["step_size"]][row["task"]["candidate"]] = f"{row['recalled']:.3f}"
        lines = [[str(step), *(c.get(name, "–") for name in names)] for step, c in sorted(recalled.items())]
        text += "\n## Capacity\n\nShare of 128 random pairs recalled, d = 32, by step size η/(1 − θ).\n\n"
        text += _table(["η/(1 − θ)", *names], lines)
    for row in parts["cost"]:
        text += "\n## Cost\n\nForward and backward of the memory, 4 heads of 64, 4,096 tokens, chunks of 64, one run: time over "
        text += "that of the paper's recurrence.\n\n" + _table(names, [[str(row[name]) for name in names]])
    if parts["train"]:
        groups: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for row in parts["train"]:
            groups[row["task"]["text"]][row["task"]["candidate"]].append(row)
        for text_name, group in groups.items():
            for name, bounded in IN_TRAIN.items():
                group[name] = [
                    r for r in trained if (r["preset"], r["text"], r["bounded"]) == ("titans", text_name, bounded)
                ]
        lines = [[t, *(_scores(c[name]) if c[name] else "–" for name in names)] for t, c in groups.items()]
        text += "\n## Training\n\ntitans-tiny at its defaults: held-out bits per byte, mean (lowest – highest) over seeds.\n\n"
        text += _table(["text", *names], lines)
    return text


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Plots bits per byte with and without the bound: a mark per seed, and a cross at the top for a diverged run."""
    compared = [row for row in rows if row["text"] == "embedded"]
    presets = sorted({row["preset"] for row in compared if not row["bounded"]})
    if not presets:
        return
    figure = pages.figure(8, 4)
    axes = figure.subplots()
    fine = [row["bits_per_byte"] for row in compared if row["preset"] in presets and row["bits_per_byte"] is not None]
    top = max(fine) + 0.05
    for offset, bounded, colour, label in (
        (-0.15, False, "tab:orange", "without the bound"),
        (0.15, True, "tab:blue", "with it"),
    ):
        chosen = [row for row in compared if row["preset"] in presets and row["bounded"] == bounded]
        good = [(presets.index(r["preset"]) + offset, r["bits_per_byte"]) for r in chosen if r["diverged_at"] is None]
        bad = [presets.index(r["preset"]) + offset for r in chosen if r["diverged_at"] is not None]
        axes.scatter(*zip(*good, strict=True), color=colour, label=label) if good else None
        axes.scatter(bad, [top] * len(bad), color=colour, marker="x", label=f"{label}: NaN" if bad else None)
    axes.set_xticks(range(len(presets)), presets, rotation=30, ha="right")
    axes.set_ylabel("held-out bits per byte")
    axes.set_title("Tiny presets, 300 steps on the embedded text, one mark for each seed")
    axes.legend()
    figure.savefig(path, dpi=120)


def write_report(rows: pathlib.Path | None = None) -> None:
    """Writes results/*.md and results/compared.png. rows: nothing is written for a file of rows that is elsewhere."""
    if rows is not None and rows.parent != RESULTS:
        return
    found = {name: read_rows(RESULTS / f"{name}.jsonl") for name in ("train", "read", "candidates", "wide")}
    tables: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
        "train": ("train", train_table),
        "compared": ("train", compared_table),
        "read": ("read", read_table),
        "candidates": ("candidates", lambda rows: candidates_tables(rows, found["train"]).lstrip()),
        "wide": ("wide", wide_table),
    }
    for page, (name, table) in tables.items():
        if found[name]:
            (RESULTS / f"{page}.md").write_text(table(found[name]))
    if found["train"]:
        plot(found["train"], RESULTS / "compared.png")


if __name__ == "__main__":
    write_report()
