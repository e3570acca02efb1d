"""Results as tables and as JSON."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from atlasjax.evaluate.long_context.task import Result, Sample, Value


def line(result: Result) -> str:
    """One line: what was measured at a length, and how fast the tokens were read."""
    value = result.values[0]
    measured = ", ".join(f"{name} {number:.3f}" for name, number in value.metrics.items())
    return (
        f"{result.length:,} tokens: {measured}; {result.tokens:,} tokens read in {result.seconds:.1f} s "
        f"({result.tokens_per_second:,.0f} tokens/s), peak memory {result.peak_memory / 2**20:,.0f} MiB"
    )


def table(results: Sequence[Result]) -> str:
    """The first metric of each task by length, with its standard error, and by depth or position; in Markdown."""
    lengths = sorted({result.length for result in results})
    rows = [["task", "metric", "where", *(f"{length:,}" for length in lengths)]]
    for task in dict.fromkeys(result.task for result in results):
        cells: dict[str, dict[int, str]] = {}
        for result in results:
            if result.task == task:
                metric = next(iter(result.values[0].metrics))
                for value in result.values:
                    cells.setdefault(_where(value), {})[result.length] = _number(value, metric)
        for i, (where, row) in enumerate(cells.items()):
            first = [task, metric] if i == 0 else ["", ""]
            rows.append([*first, where, *(row.get(length, "") for length in lengths)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def as_json(result: Result, *, samples: bool = False) -> dict[str, object]:
    """A result for `json.dumps`, with its samples if asked for. A standard error that is not known is null."""
    fields = dataclasses.asdict(result if samples else dataclasses.replace(result, samples=[]))
    if not samples:
        del fields["samples"]
    for value in fields["values"]:
        value["standard_error"] = None if math.isnan(value["standard_error"]) else value["standard_error"]
    return {**fields, "tokens_per_second": result.tokens_per_second}


def of_json(fields: Mapping[str, Any]) -> Result:
    """The inverse of `as_json`.

    Raises:
      KeyError, TypeError: `fields` are those of something else.
    """
    values = [
        Value(
            **value
            | {
                "standard_error": math.nan if value["standard_error"] is None else value["standard_error"],
                "positions": None if value["positions"] is None else tuple(value["positions"]),
            }
        )
        for value in fields["values"]
    ]
    samples = [Sample(**{**sample, "answers": tuple(sample["answers"])}) for sample in fields.get("samples", ())]
    numbers = {name: fields[name] for name in ("task", "length", "tokens", "seconds", "peak_memory")}
    return Result(**numbers, values=values, samples=samples)


def _where(value: Value) -> str:
    if value.positions is not None:
        return f"positions {value.positions[0]:,} to {value.positions[1]:,}"
    return "all" if value.depth is None else f"depth {100 * value.depth:g}%"


def _number(value: Value, metric: str) -> str:
    error = "" if math.isnan(value.standard_error) else f" ± {value.standard_error:.3f}"
    return f"{value.metrics[metric]:.3f}{error}"
