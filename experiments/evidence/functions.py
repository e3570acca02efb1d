"""Comparisons of function learning."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from experiments.evidence.sources import Line, rows
from experiments.intervals import paired

MAPPINGS = {
    "low_rank": "1, low rank", "mlp": "2, MLP", "attention_mlp": "3, attention then MLP",
    "attention_as_input": "4, attention as input", "window_attention_mlp": "5, window attention then MLP",
}  # fmt: skip


def _function_rows() -> dict[tuple[Any, ...], dict[int, float]]:
    """(width, hidden layers, expansion, optimizer, mapping) → seed → log2 of the last loss; diverged runs are left out."""
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows("function_learning/results.jsonl"):
        if row["kind"] == "run" and row["last"] is not None:
            key = (row["dim"], row["hidden_layers"], row["expansion"], row["optimizer"], row["setting"])
            found.setdefault(key, {})[row["seed"]] = math.log2(row["last"])
    return found


def function_order(pairs: Iterable[tuple[str, str]], dim: int = 256) -> list[Line]:
    """(easier, harder) mappings at one width, for every shape and optimizer: halvings of the last loss."""
    table, found = _function_rows(), []
    for easier, harder in pairs:
        for width, hidden, expansion, optimizer, setting in sorted(table):
            if width != dim or setting != easier:
                continue
            a, b = (table.get((width, hidden, expansion, optimizer, name), {}) for name in (easier, harder))
            memory = f"{hidden} hidden layers, {expansion}x, {optimizer}, d = {width}"
            found += _line(f"{MAPPINGS[easier]}, against {MAPPINGS[harder]}: {memory}", b, a)
    return found


def _line(told: str, above: dict[int, float], below: dict[int, float]) -> list[Line]:
    """The line of two learners by seed, of which the second should have the lower loss; none without seeds of both."""
    comparison = paired(above, below)
    return [] if comparison is None else [Line(told, comparison, "halvings of the loss", 4096, "function_learning")]


def function_muon() -> list[Line]:
    """Muon against the best of the paper's three optimizers, for every mapping and shape: halvings of the last loss."""
    table, found = _function_rows(), []
    for dim, hidden, expansion, optimizer, setting in sorted(table):
        if optimizer != "muon":
            continue
        others = {o: table.get((dim, hidden, expansion, o, setting), {}) for o in ("sgd", "rmsprop", "adam")}
        best_name = min((o for o in others if others[o]), key=lambda o: float(np.mean(list(others[o].values()))))
        told = f"Muon against {best_name}: mapping {MAPPINGS[setting]}; {hidden} hidden layers, {expansion}x, d = {dim}"
        found += _line(told, others[best_name], table[dim, hidden, expansion, "muon", setting])
    return found
