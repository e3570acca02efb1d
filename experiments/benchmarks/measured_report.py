"""The pages of `kernels_measured.py`: tables of finished lines, and the resulting rows for `memory.fastest`."""

import collections
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from experiments import pages
from experiments.benchmarks.measured_cases import ENGINES, OPERATIONS, OTHER_FUNCTIONS, Case
from experiments.rows import Row

_BASELINES = (("xla",), ("attention", "attention_cudnn"))


def key(case: Case, device: str, jax: str) -> tuple[Any, ...]:
    return case, device, jax


def latest(lines: list[Row]) -> dict[tuple[Any, ...], Row]:
    """(case, device, version of jax) → its last line."""
    return {key(Case(**line["case"]), line["device"], line["jax"]): line for line in lines}


def seconds(rows: dict[str, Row], engines: Iterable[str], over: Callable[[list[float]], float]) -> float | None:
    """The time of the fastest of some engines, each by median or minimum over rounds. None if none has a time."""
    return min((over(rows[name]["seconds"]) for name in engines if "seconds" in rows.get(name, {})), default=None)


def ratio(
    rows: dict[str, Row], baseline: Iterable[str], engine: str, over: Callable[[list[float]], float] = statistics.median
) -> float | None:
    """How many times as long the fastest baseline takes. None if one of the two has no time."""
    slow, fast = seconds(rows, baseline, over), seconds(rows, [engine], over)
    return None if slow is None or fast is None else slow / fast


def summary(rows: dict[str, Row]) -> str:
    """The medians of one case, on one line."""
    found = []
    for engine, row in rows.items():
        if "seconds" in row:
            share = ratio(rows, [engine], "xla")
            other = f" ({pages.number(share)} × xla's)" if share and engine != "xla" else ""
            found.append(f"{engine} {pages.number(1e3 * statistics.median(row['seconds']))} ms{other}")
        elif "failed" in row:
            found.append(f"{engine} failed, {row['failed']}")
    return ", ".join(found) or "nothing ran"


_COLUMNS = ("case", "pass", "engine", "ms", "XLA ÷ it", "attention ÷ it", "temporary MiB", "error of y", "of gradients")
_OVER = (statistics.median, min)


def sizes(case: Case) -> str:
    if case.is_matrices:
        return f"{case.batch} matrices {case.dim} × {4 * case.dim}"
    return f"d = {case.dim}, {case.batch} × {case.tokens:,} tokens, {case.heads} heads, {case.dtype}"


def cells(case: Case, rows: dict[str, Row]) -> list[list[str]]:
    """One table row per engine with a time, from the third column on. Of two numbers the second is for the fastest rounds."""
    table = []
    for engine, row in rows.items():
        if "seconds" not in row:
            continue
        figures = [[1e3 * over(row["seconds"]) for over in _OVER]]
        for baseline in _BASELINES:
            ratios = [ratio(rows, baseline, engine, over) for over in _OVER]
            figures.append([x for x in ratios if x is not None and engine not in baseline])
        size = row.get("temporary_bytes")
        error = [f"{x:.0e}" for x in row["error"].values()] if "error" in row else ["", ""]
        if row.get("checked_dtype", case.dtype) != case.dtype:
            error = [f"{x} ({row['checked_dtype']})" for x in error]
        text = [f"{pages.number(x[0])} ({pages.number(x[1])})" if x else "" for x in figures]
        table.append([engine, *text, "" if size is None else f"{size / 2**20:,.1f}", *error])
    return table


def without_time(lines: Iterable[Row]) -> list[str]:
    """The engines without a time and the operations concerned, one text for each reason."""
    reasons: dict[tuple[str, str], dict[str, None]] = collections.defaultdict(dict)
    for line in lines:
        for engine, row in line["engines"].items():
            for kind in ("refused", "failed"):
                if kind in row:
                    reason = row[kind] if kind == "refused" else f"failed, {row[kind]}"
                    reasons[engine, reason][line["case"]["operation"]] = None
    return [f"{engine}: {reason} ({', '.join(names)})" for (engine, reason), names in sorted(reasons.items())]


def page(lines: list[Row]) -> str:
    """The finished lines as a Markdown page, by device."""
    groups: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for line in latest(lines).values():
        groups[line["device"], line["jax"]].append(line)
    text = [_EXPLANATION]
    order = lambda case: (list(OPERATIONS).index(case.operation), case.dim, case.dtype, case.direction == "both")
    for (device, jax), found in sorted(groups.items()):
        text += [f"\n## {device}, jax {jax}\n"]
        text += [f"    {command}" for command in dict.fromkeys(line["command"] for line in found)]
        table: list[list[str]] = []
        for case, line in sorted(((Case(**line["case"]), line) for line in found), key=lambda x: order(x[0])):
            first = [f"{case.operation}, {sizes(case)}", case.direction]
            table += ([x.replace("|", "\\|") for x in (*first, *row)] for row in cells(case, line["engines"]))
        text += ["", *pages.table(_COLUMNS, table, left=(0, 1, 2))]
        if told := without_time(found):
            text += ["\nWithout a time:\n", *(f"- {line}" for line in told)]
    return "\n".join(text) + "\n"


def _others() -> str:
    return "; ".join(f"{engine}'s {operation} {what}" for (engine, operation), what in OTHER_FUNCTIONS.items())


_EXPLANATION = f"""\
# Measured time of kernels and engines

Generated by `experiments/benchmarks/kernels_measured.py`. Numbers are medians over rounds in which all engines of a case run in
turn, and in parentheses those of the fastest rounds. If other programs use the machine the two differ, and the latter are more
reliable. **Only ratios within one case are meaningful.** Pass "both" is forward and backward, with the gradients of all inputs and
parameters.

- **XLA ÷ it**: how many times as long the XLA engine takes for the same function. **attention ÷ it**: softmax attention (causal,
  `jax.nn.dot_product_attention`, the faster of its implementations) with as many heads of the same width, over the same tokens.
- **error**: error of the outputs, and of the worst gradient, against the definition in float64 on two chunks and a remainder,
  relative to the largest entry of the exact array. A kernel beyond its tolerance has no time. Atlas is checked in float32, because
  Newton–Schulz amplifies the bfloat16 rounding of low-rank momenta to noise.
- **temporary MiB**: from XLA's memory analysis; for PyTorch the peak allocation.
- Different functions, and therefore without an error: {_others()}."""


def show(lines: list[Row], cases: list[Case], device: Any) -> None:
    """Prints the table of some cases of a device."""
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{device.name}, jax {device.jax}")
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if i < 3 else "right")
    done = latest(lines)
    measured = [case for case in cases if key(case, device.name, device.jax) in done]
    found = [done[key(case, device.name, device.jax)] for case in measured]
    for case, line in zip(measured, found, strict=True):
        first = [f"{case.operation}\n{sizes(case)}", case.direction]
        rows = cells(case, line["engines"])
        for i, row in enumerate(rows):
            table.add_row(*(["", ""] if i else first), *row, end_section=i == len(rows) - 1)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for text in without_time(found):
        console.print(f"without a time: {text}", highlight=False, markup=False)


def measurements(lines: list[Row], cases: list[Case], device: Any, command: str) -> tuple[list[Any], list[str]]:
    """Rows for `memory.fastest` from the cases of a run, and the reasons why others are missing.

    A kernel's ratio is the smallest over its operations, forward and backward, all of which must be in the run and done. Calls that
    `memory.scan` reports as unsupported do not count. Other failures and wrong results count as 0.
    """
    from atlasjax.memory.fast_weights.fastest import PLATFORMS, Measurement

    engines = [name for name, platform in PLATFORMS.items() if platform == device.platform]
    if not engines:
        return [], [f"{device.platform} has no kernels: the XLA engine is what runs there."]
    (engine,) = engines  # one for each platform so far
    assert ENGINES[engine] == device.platform
    done = latest(lines)
    found: list[Measurement] = []
    lacking = []
    both = [case for case in cases if case.direction == "both" and key(case, device.name, device.jax) in done]
    groups = dict.fromkeys((OPERATIONS[case.operation], case.dim, case.dtype) for case in both)
    for kernel, dim, dtype in groups:
        if kernel is None:
            continue
        mine = [case for case in both if (OPERATIONS[case.operation], case.dim, case.dtype) == (kernel, dim, dtype)]
        needed = {name for name, of in OPERATIONS.items() if of == kernel} - {case.operation for case in mine}
        where = f"{kernel}, d = {dim}, {dtype}"
        if needed:
            lacking.append(f"{where}: the run is without {', '.join(sorted(needed))}")
            continue
        ratios = []
        for case in mine:
            rows = done[key(case, device.name, device.jax)]["engines"]
            if "cannot run this call" in rows[engine].get("refused", ""):
                continue
            over = ratio(rows, ["xla"], engine)
            if over is not None or "seconds" not in rows[engine]:
                ratios.append(round(over or 0.0, 3))
        if not ratios:
            lacking.append(f"{where}: {engine} ran none of it")
            continue
        found.append(
            Measurement(device.platform, kernel, dim, dtype, engine, min(ratios), device.name, device.jax, command)
        )
    return found, lacking
