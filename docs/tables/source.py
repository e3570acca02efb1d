"""Where the tables come from: rows of experiments, and how a table is written."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "experiments/benchmarks"


def rows(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines() if line]


def table(head: Iterable[str], body: Iterable[Iterable[object]], right: Iterable[int] = ()) -> str:
    """A Markdown table; right: columns of numbers."""
    head, right = list(head), set(right)
    lines = [head, ["---:" if i in right else "---" for i in range(len(head))], *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"
