"""Costs of the kernels on a TPU by the compiler's schedule, compared with the XLA engine and the arithmetic floor. Needs no TPU.

    python experiments/benchmarks/kernels_tpu.py                        # every kernel for v5e; an hour on two cores
    python experiments/benchmarks/kernels_tpu.py --quick                # d = 64, forward: ten minutes
    python experiments/benchmarks/kernels_tpu.py --topology v6e         # another chip: v5e, v5p, v6e
    python experiments/benchmarks/kernels_tpu.py --only mlp 128         # cases whose name has all these words
    python experiments/benchmarks/kernels_tpu.py plot                   # roofline, byte check and docs' figure from finished rows

libtpu (extra `test`: `jax[tpu]`) compiles each program for a chip that is only named. It runs in a child process, because it can
crash its process. One line of JSON per program is appended to `--out`. Finished programs are skipped, so the command resumes
where it was stopped. `--again` repeats measurements; the later line of a case counts. The table (`.md`) is rewritten from the
lines each time. These are static figures of the compiler, not measured times. They serve for comparisons and regressions.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks.kernel_cases import Case, all_cases, quick_cases
from experiments.benchmarks.kernel_report import byte_table, latest, program_cycles, table
from experiments.benchmarks.tpu_static import CHIPS, environment
from experiments.rows import Row, append_row, read_rows

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def sources(operation: str) -> str:
    """A digest of a kernel's source files, to recognize rows of an older version."""
    folder = ROOT / "pallas_kernels"
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *(folder / operation).glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def compile_case(case: Case, topology: str, limit: float) -> Row:
    """The row of one case, with "error" if its program did not compile."""
    started = time.perf_counter()
    row: Row = {"case": dataclasses.asdict(case), "topology": topology, "sources": sources(case.operation)}
    row |= {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "tpu_static.py"), json.dumps(row["case"]), topology, folder]
        # XLA's estimates are in the compiled program's text, so nothing needs to be written.
        variables = environment(CHIPS[topology], folder if case.engine == "pallas_tpu" else None)
        try:
            child = subprocess.run(
                command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            result = {"error": f"not compiled within {limit:g} s"}
        else:
            if child.returncode:
                result = {"error": _reason(child.stderr) or f"the compiler ended with {child.returncode}"}
            else:
                result = json.loads(child.stdout.splitlines()[-1])
    return row | {"seconds": round(time.perf_counter() - started, 1)} | result


def _reason(stderr: str) -> str:
    """The line of a failed child's standard error that gives the reason."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "RESOURCE_EXHAUSTED" in line or "INTERNAL" in line]
    return (told or lines or [""])[-1][:300]


def measure(
    cases: list[Case],
    topology: str,
    path: pathlib.Path,
    again: bool,
    run: Callable[[Case], Row],
) -> list[Row]:
    """Compiles all cases that have no row yet (all with `again`), appending each at once. Returns every row of the file."""
    rows = read_rows(path)
    done = latest(rows, topology)
    todo = [case for case in cases if again or case.name not in done]
    print(f"{len(cases) - len(todo)} of {len(cases)} programs for {topology} are in {path.name}", flush=True)
    kept = [case for case in cases if case not in todo and case.engine == "pallas_tpu"]
    older = sum(done[case.name]["sources"] != sources(case.operation) for case in kept)
    if older:
        print(
            f"{older} of them were compiled with an older version of pallas_kernels/; --again repeats them", flush=True
        )
    for number, case in enumerate(todo, 1):
        row = run(case)
        append_row(path, row)
        rows.append(row)
        cycles = "" if "error" in row else f"{program_cycles(row) / case.items:,.1f} cycles per {case.item}"
        print(f"[{number}/{len(todo)}] {case.name}: {cycles or row['error']} ({row['seconds']:.0f} s)", flush=True)
    return rows


def beside(out: pathlib.Path, topology: str, suffix: str) -> pathlib.Path:
    """The path of a file beside the rows. For v5e it has no chip in its name."""
    return out.with_name(out.stem + ("" if topology == "v5e" else f"_{topology}") + suffix)


def write_table(rows: list[Row], topology: str, out: pathlib.Path) -> str:
    """Rewrites the page of all finished rows of a chip, and returns it."""
    command = "python experiments/benchmarks/kernels_tpu.py" + ("" if topology == "v5e" else f" --topology {topology}")
    found = latest(rows, topology)
    page = table(found, topology, command)
    beside(out, topology, ".md").write_text(page)
    return page


def report(rows: list[Row], topology: str, out: pathlib.Path) -> None:
    """Writes the table, the roofline and the figure of the docs from finished rows, and prints the bytes moved by kernels."""
    from experiments.benchmarks import kernel_plots

    found = latest(rows, topology)
    if not found:
        sys.exit(f"{out} has no rows for {topology}: run the command without `plot` first.")
    write_table(rows, topology, out)
    kernel_plots.roofline(found, topology, beside(out, topology, ".png"))
    kernel_plots.grid_figure(ROOT / "docs" / "figures" / "chunk_scan.png")
    print(byte_table(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "plot"), default="measure")
    parser.add_argument("--topology", choices=CHIPS, default="v5e", help="the chip (default v5e)")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="cases with all these words in their name, e.g. gram 128"
    )
    parser.add_argument("--quick", action="store_true", help="d = 64, forward")
    parser.add_argument("--again", action="store_true", help="measure finished cases again")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for one program")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=HERE / "kernels_tpu.jsonl",
        help="file of rows; the table is beside it",
    )
    options = parser.parse_args()
    if options.what == "plot":
        report(read_rows(options.out), options.topology, options.out)
        return
    if importlib.util.find_spec("libtpu") is None:
        sys.exit(
            "libtpu, the TPU compiler, is not installed: pip install -e '.[test]', or `jax[tpu]` of the installed jax."
        )
    cases = quick_cases() if options.quick else all_cases()
    if options.only:
        cases = [case for case in cases if all(word in case.name.split() for word in options.only)]
    if not cases:
        sys.exit(f"No case has all of {options.only} in its name; one is called {all_cases()[-1].name!r}.")
    run = lambda case: compile_case(case, options.topology, options.limit)
    rows = measure(cases, options.topology, options.out, options.again, run)
    print(write_table(rows, options.topology, options.out))


if __name__ == "__main__":
    main()
