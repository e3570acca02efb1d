"""The table of the kernels: where each was interpreted, compiled and run."""

import itertools
import json
import re
from typing import Any

from atlasjax.memory.fast_weights.fastest import LEAST_RATIO
from docs.tables.rules import PLATFORMS
from docs.tables.source import BENCHMARKS, ROOT, rows, table

KERNELS = ("delta_rule", "linear_rule", "chunk_memory", "newton_schulz")

_NOT_WRITTEN = {("linear_rule", "GPU")}


def status_kernels() -> str:
    """Each kernel on each platform: whether it was interpreted, compiled, run, and is chosen by default."""
    static = rows(BENCHMARKS / "kernels_tpu.jsonl")
    measured = rows(BENCHMARKS / "kernels_measured.jsonl")
    recorded = json.loads((ROOT / "atlasjax/memory/fast_weights/fastest.json").read_text())
    lines = []
    for kernel, (implementation, label) in itertools.product(KERNELS, PLATFORMS.items()):
        if (kernel, label) in _NOT_WRITTEN:
            continue
        compiled, in_tests = _compiled(kernel, label, static)
        ran = sorted(
            {
                row["device"]
                for row in measured
                if _kernel_of(row["case"]["operation"]) == kernel
                and "seconds" in row["engines"].get(implementation, {})
            }
        )
        chosen = sorted(
            {
                row["device"]
                for row in recorded
                if _kernel_of(row["kernel"]) == kernel
                and row["implementation"] == implementation
                and row["ratio_to_xla"] > LEAST_RATIO
            }
        )
        lines.append(
            (
                f"`{kernel}`",
                label,
                _interpreted(kernel, implementation),
                in_tests,
                compiled,
                ", ".join(ran) or "not run",
                ", ".join(chosen) or "nowhere",
            )
        )
    head = (
        "kernel",
        "on",
        "proven, interpreted",
        "compiled by tests for",
        "rows of the compiler",
        "run on",
        "chosen by default on",
    )
    return table(head, lines)


def _kernel_of(operation: str) -> str:
    """The kernel behind an operation of the rows: rules of the memory core run in chunk_memory."""
    for kernel in KERNELS:
        if kernel in operation:
            return kernel
    return "chunk_memory"


def _interpreted(kernel: str, implementation: str) -> str:
    """The tests that run the kernel of that platform in interpret mode."""
    own, shared = (f"tests/pallas_kernels/test_{kernel}{end}.py" for end in ("_gpu", ""))
    path = own if implementation == "pallas_gpu" and (ROOT / own).exists() else shared
    text = (ROOT / path).read_text()
    found = "interpret" in text and (path == own or implementation == "pallas_tpu" or implementation in text)
    return f"`{path}`" if found else "no"


def _compiled(kernel: str, label: str, static: list[dict[str, Any]]) -> tuple[str, str]:
    """(targets of the rows, targets of the tests)."""
    if label == "GPU":
        wide = [
            row
            for row in rows(BENCHMARKS / "kernels_gpu.jsonl")
            if _kernel_of(row["case"][0]) == kernel and row["kernels"]
        ]
        child = (ROOT / "tests/pallas_kernels/compile_gpu_child.py").read_text()
        return (f"H200 ({len(wide)})" if wide else "none"), ("H200" if kernel in child else "none")
    found = [row for row in static if row["case"]["operation"] == kernel and row["kernels"]]
    topologies = sorted({row["topology"] for row in found})
    targets = [f"{name} ({sum(row['topology'] == name for row in found)})" for name in topologies]
    child = (ROOT / "tests/pallas_kernels/compile_child.py").read_text()
    tests = re.search(r'"topology", \[([^\]]*)\]', (ROOT / "tests/pallas_kernels/test_compile.py").read_text())
    chips = [name.strip('" ').partition(":")[0] for name in tests[1].split(",")] if tests and kernel in child else []
    return ", ".join(targets) or "none", ", ".join(chips) or "none"
