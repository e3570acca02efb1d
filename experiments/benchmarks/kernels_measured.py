"""Time of the memory kernels on jax's device, compared with the XLA engine, softmax attention and other libraries.

    python experiments/benchmarks/kernels_measured.py                      # 4 × 8,192 tokens, 16 heads, d = 64 and 128, bfloat16
    python experiments/benchmarks/kernels_measured.py --only omeganet delta_rule --dims 64
    python experiments/benchmarks/kernels_measured.py --record             # also into atlasjax/memory/fast_weights/fastest.json
    python experiments/benchmarks/kernels_measured.py --compile            # only fills $JAX_COMPILATION_CACHE_DIR
    JAX_PLATFORMS=cpu python experiments/benchmarks/kernels_measured.py --batch 1 --tokens 2048 --heads 4 --dims 64 --dtype float32

Each operation is timed forward, and forward and backward with the gradients of all inputs and parameters: with the XLA engine, the
platform's kernels, `jax.nn.dot_product_attention` (causal, same heads) and, if installed and supported on the device,
flash-linear-attention and titans-pytorch. The engines of a case are timed in turn and compared by medians over rounds, so ratios
within one case are meaningful on any machine. Before it is timed, every engine runs two chunks and a remainder of the case, and its
outputs and gradients are compared with the definition in float64. A wrong kernel gets no time.

One line of JSON per case is appended to `--out`. Finished cases of this device, jax version and size are skipped, so the command
resumes where it was stopped. `--again` repeats measurements; the later line counts. The table (`.md`) is rewritten from the lines
each time.

Most of the time is compiling and checking. `--compile` does only these, in as many processes as you start (each with `--only`):
programs go to JAX_COMPILATION_CACHE_DIR, results of checks to the file `--checks`, from which the same command without `--compile`
takes them. `on_gpu.py` does both.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import platform as machine
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from atlasjax import storage
from atlasjax.names import lookup
from experiments.benchmarks import measured_cases, measured_report
from experiments.benchmarks.kernel_cases import DIRECTIONS
from experiments.benchmarks.measured_cases import ENGINES, OPERATIONS, PLATFORM_NAMES, Case
from experiments.rows import Row, append_row, read_rows

HERE = pathlib.Path(__file__).resolve().parent
_SHORTEST = 0.02  # seconds per measurement on an accelerator, where starting a call takes longer than the call


@dataclasses.dataclass(frozen=True)
class Device:
    """The device of jax: "cpu", "cuda", "rocm" or "tpu", and its public name."""

    platform: str
    name: str
    jax: str


def find_device() -> Device:
    import jax

    from atlasjax.memory import tuned

    device = jax.devices()[0]
    name = device.device_kind
    if device.platform == "cpu":
        info = pathlib.Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = f"{models[0] if models else machine.machine()}, {os.cpu_count()} cores"
    return Device(tuned.platform(), name, jax.__version__)


def sources() -> str:
    """A digest of the engines and kernels, to recognize lines of an older version."""
    from atlasjax.memory import tuned

    return tuned.sources()


@dataclasses.dataclass(frozen=True)
class Program:
    """One case compiled with one engine. `run` computes it a number of times and waits for the result."""

    run: Callable[[int], None]
    result: Callable[[], Any]
    figures: Row


def jax_program(case: Case, engine: str) -> Program:
    import jax

    run = measured_cases.program(measured_cases.function(case, engine), case.direction)
    arguments = jax.tree.map(jax.numpy.asarray, measured_cases.inputs(case))
    started = time.perf_counter()
    compiled = jax.jit(run).lower(*arguments).compile()
    figures: Row = {"compile_s": round(time.perf_counter() - started, 2)}
    if (memory := compiled.memory_analysis()) is not None:
        figures["temporary_bytes"] = memory.temp_size_in_bytes

    def repeat(calls: int) -> None:
        for _ in range(calls):
            out = compiled(*arguments)
        jax.block_until_ready(out)

    return Program(repeat, lambda: jax.device_get(compiled(*arguments)), figures)


def computed(case: Case, engine: str) -> Case:
    """The function of an engine for a case. Attention has no use for a rule: one check and program for all operations."""
    return dataclasses.replace(case, operation="delta_rule") if engine.startswith("attention") else case


def compile_only(
    cases: list[Case], device: Device, known: dict[Any, Row], engines: Collection[str], path: pathlib.Path | None
) -> None:
    """Checks these engines of the cases and compiles JAX's into its compilation cache. What fails is printed, and left.

    path: a file to which the seconds of both are appended, or None.
    """
    import jax

    for case in cases:
        for engine in case.engines:
            if engine not in engines or unavailable(engine, device) is not None:
                continue
            of = computed(case, engine)
            started = checked = time.perf_counter()
            try:
                text = f"{check(of, engine, device, known)}"
                checked = time.perf_counter()
                if engine in measured_cases.OTHER_LIBRARIES:
                    torch_program(of, engine, device).run(1)
                else:
                    run = measured_cases.program(measured_cases.function(of, engine), of.direction)
                    jax.jit(run).lower(*measured_cases.shapes(of)).compile()
            except Exception as error:  # of a compiler, or of a call that the engine does not support
                text = f"{type(error).__name__}: {reason_of(error)}"
            took = {"checked_s": round(checked - started, 1), "compiled_s": round(time.perf_counter() - checked, 1)}
            row = {"case": dataclasses.asdict(case), "engine": engine, "device": device.name, "jax": device.jax, **took}
            if path is not None:
                append_row(path, row | {"result": text})
            print(f"{case.name}, {engine}, {took}: {text}", flush=True)


def torch_program(case: Case, engine: str, device: Device) -> Program:
    from experiments.benchmarks import measured_torch

    made = measured_torch.program(case, engine, device.platform == "cuda")
    used = made.temporary_bytes()
    return Program(made.run, made.result, {} if used is None else {"temporary_bytes": used})


def prepare(case: Case, engine: str, device: Device) -> Program:
    if engine in measured_cases.OTHER_LIBRARIES:
        return torch_program(case, engine, device)
    return jax_program(case, engine)


def unavailable(engine: str, device: Device) -> str | None:
    """The reason why an engine cannot run on this device at all, or None."""
    needs = ENGINES[engine]
    if needs is not None and needs != device.platform:
        return f"needs {PLATFORM_NAMES[needs]}"
    if engine in measured_cases.OTHER_LIBRARIES:
        from experiments.benchmarks import measured_torch

        if engine == "titans_pytorch" and device.platform not in ("cpu", "cuda"):
            return "needs a CPU or a CUDA GPU"
        return measured_torch.missing(engine)
    return None


class Checks(dict[Any, Row]):
    """(small case, engine) → the result of its check; kept in a file, if there is one, which several processes may share."""

    def __init__(self, device: Device, path: pathlib.Path | None = None):
        self._path, self._origin = path, {"device": device.name, "jax": device.jax, "sources": sources()}
        for row in [] if path is None else read_rows(path):
            if {name: row[name] for name in self._origin} == self._origin:
                super().__setitem__((Case(**row["case"]), row["engine"]), row["result"])

    def __setitem__(self, key: Any, result: Row) -> None:
        super().__setitem__(key, result)
        if self._path is not None:
            case, engine = key
            append_row(
                self._path, {"case": dataclasses.asdict(case), "engine": engine, **self._origin, "result": result}
            )


def check(case: Case, engine: str, device: Device, known: dict[Any, Row]) -> Row:
    """{"error": …} of the small case, with "failed" if a kernel is wrong; {} for a different function. `known` caches the results.

    Baselines (the XLA engine, attention) always keep their time, because their error is that of the device's own products.
    """
    if (engine, case.operation) in measured_cases.OTHER_FUNCTIONS:
        return {}
    little = measured_cases.small(case)
    if (little, engine) not in known:
        error = measured_cases.errors(prepare(little, engine, device).result(), little, engine)
        row: Row = {"error": error, "checked_dtype": little.dtype}
        most = measured_cases.tolerance(little)
        if engine not in ("xla", "attention") and not all(x <= most for x in error.values()):  # also where one is NaN
            found = ", ".join(f"{name} {x:.1e}" for name, x in error.items())
            row["failed"] = f"wrong: errors of {found}, allowed {most:g} in {little.dtype}"
        known[little, engine] = row
    return known[little, engine]


def measure(
    case: Case, device: Device, repeats: int, known: dict[Any, Row], engines: Collection[str] = tuple(ENGINES)
) -> dict[str, Row]:
    """Engine → its row: seconds of every round, compiled figures and error, or "refused" or "failed" with the reason."""
    rows: dict[str, Row] = {}
    programs: dict[str, tuple[Program, int]] = {}
    for engine in case.engines:
        if engine not in engines:
            continue
        rows[engine] = row = {}
        if (reason := unavailable(engine, device)) is not None:
            row["refused"] = reason
            continue
        of = computed(case, engine)
        try:
            row |= check(of, engine, device, known)
            if "failed" in row:
                continue
            program = prepare(of, engine, device)
            program.run(1)
            started = time.perf_counter()
            program.run(1)
            calls = 1 if device.platform == "cpu" else min(100, -(-_SHORTEST // (time.perf_counter() - started)))
            row |= program.figures
            programs[engine] = program, int(calls)
        except ValueError as error:  # mostly calls that an engine does not support, with the reason
            row["refused"] = reason_of(error)
        except Exception as error:  # from a compiler, an allocator or another library; the other engines continue
            row["failed"] = f"{type(error).__name__}: {reason_of(error)}"
    for engine in programs:
        rows[engine] |= {"seconds": []}
    for _ in range(repeats):
        for engine, (program, calls) in programs.items():
            started = time.perf_counter()
            program.run(calls)
            rows[engine]["seconds"].append(float(f"{(time.perf_counter() - started) / calls:.4g}"))
    return rows


def reason_of(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def run_cases(
    cases: list[Case],
    device: Device,
    path: pathlib.Path,
    repeats: int,
    again: bool,
    command: str,
    measure: Any = measure,
    seconds: float = math.inf,
    known: dict[Any, Row] | None = None,
) -> list[Row]:
    """Measures all cases that have no line yet (all with `again`), appending each at once. Returns every line of the file.

    None is begun later than `seconds` after the start.
    """
    lines = read_rows(path)
    done = measured_report.latest(lines)
    todo = [case for case in cases if again or measured_report.key(case, device.name, device.jax) not in done]
    print(
        f"{device.name}, jax {device.jax}: {len(cases) - len(todo)} of {len(cases)} cases are in {path.name}",
        flush=True,
    )
    digest = sources()
    kept = [done[measured_report.key(case, device.name, device.jax)] for case in cases if case not in todo]
    if older := sum(line["sources"] != digest for line in kept):
        print(f"{older} of them were measured with an older version of the engines; --again repeats them", flush=True)
    known = {} if known is None else known
    first = time.perf_counter()
    for number, case in enumerate(todo, 1):
        started = time.perf_counter()
        if started - first > seconds:
            print(f"{len(todo) - number + 1} cases are left: the same command measures them", flush=True)
            break
        rows = measure(case, device, repeats, known)
        line: Row = {"case": dataclasses.asdict(case), "device": device.name, "platform": device.platform}
        line |= {"jax": device.jax, "sources": digest, "command": command, "engines": rows}
        append_row(path, line)
        lines.append(line)
        took = time.perf_counter() - started
        print(f"[{number}/{len(todo)}] {case.name} ({took:.0f} s): {measured_report.summary(rows)}", flush=True)
    return lines


def record(lines: list[Row], cases: list[Case], device: Device, command: str, path: pathlib.Path) -> None:
    """Writes the cases' results on kernels into the table of `memory.fastest`, replacing older rows with the same key."""
    from atlasjax.memory.fast_weights import fastest

    new, lacking = measured_report.measurements(lines, cases, device, command)
    for text in lacking:
        print(f"not recorded: {text}")
    kept = {row.key: row for row in fastest.read(path)} if path.exists() else {}
    kept |= {row.key: row for row in new}
    rows = [json.dumps(dataclasses.asdict(row)) for _, row in sorted(kept.items())]
    storage.write_whole(path, ("[\n" + ",\n".join(rows) + "\n]\n" if rows else "[]\n").encode())
    print(f"{len(new)} rows recorded in {path.name}, {len(kept)} in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a sequence; a sixteenth for Atlas")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--matrices", type=int, default=256, help="of newton_schulz")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head dimensions")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of tokens")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS), help="passes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"operations: {', '.join(OPERATIONS)}")
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case later than this after the first")
    parser.add_argument("--again", action="store_true", help="measure finished cases again")
    parser.add_argument("--compile", action="store_true", help="only check, and compile into jax's compilation cache")
    parser.add_argument(
        "--seconds-out", type=pathlib.Path, help="with --compile, file of lines with the seconds of each"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="all by default")
    parser.add_argument("--checks", type=pathlib.Path, help="file of the results of checks, to share them")
    parser.add_argument(
        "--record", action="store_true", help="write the results into atlasjax/memory/fast_weights/fastest.json"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=HERE / "kernels_measured.jsonl",
        help="file of lines; the table is beside it",
    )
    options = parser.parse_args()
    names = options.only or list(OPERATIONS)
    sizes = {name: getattr(options, name) for name in ("tokens", "batch", "heads", "matrices")}
    try:
        for name in names:
            lookup("operation", name, OPERATIONS)
        for name, value in {**sizes, "repeats": options.repeats, "dims": min(options.dims)}.items():
            if value < 1:
                raise ValueError(f"--{name} {value}, must be at least 1.")
        if options.tokens < measured_cases.CHUNK:
            raise ValueError(f"--tokens {options.tokens}, must be at least a chunk, {measured_cases.CHUNK}.")
    except ValueError as error:
        sys.exit(str(error))
    device = find_device()
    cases = measured_cases.all_cases(names, options.dims, options.dtype, **sizes, directions=options.directions)
    known = Checks(device, options.checks)
    if options.compile:
        return compile_only(cases, device, known, options.engines, options.seconds_out)
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    words += ["--dims", *map(str, options.dims), "--dtype", options.dtype, "--repeats", str(options.repeats)]
    words += ["--only", *options.only] if options.only else []
    words += ["--engines", *options.engines] if len(options.engines) < len(ENGINES) else []
    words += ["--directions", *options.directions] if len(options.directions) < len(DIRECTIONS) else []
    command = " ".join(["python experiments/benchmarks/kernels_measured.py", *words])
    more = {"measure": functools.partial(measure, engines=options.engines), "seconds": options.seconds, "known": known}
    lines = run_cases(cases, device, options.out, options.repeats, options.again, command, **more)
    options.out.with_suffix(".md").write_text(measured_report.page(lines))
    measured_report.show(lines, cases, device)
    if options.record:
        from atlasjax.memory.fast_weights import fastest

        record(lines, cases, device, command + " --record", fastest.PATH)


if __name__ == "__main__":
    main()
