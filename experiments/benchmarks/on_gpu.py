"""Checks and times kernels, training steps and commands on an NVIDIA GPU, in at most eight minutes, the most telling first.

    pip install flash-linear-attention==0.6.0 titans-pytorch==0.5.5         # the other libraries, if they are to be timed
    python experiments/benchmarks/on_gpu.py --out build/gpu                 # `--seconds 1800` for all of it on a slow machine
    JAX_PLATFORMS=cpu python experiments/benchmarks/on_gpu.py --small --out build/gpu     # tries the command itself

Parts, in this order. Each has a share of the time that is left, begins nothing that it cannot end, and leaves out what it lacks:

| part | what | share |
| --- | --- | --- |
| machine | the device, versions, and its measured ceilings: a bfloat16 product of 8,192³ and a large copy | 40 s |
| kernels | each is checked against its definition, values and gradients; in a few processes, which also compile the rest | 0.4 |
| times | linear and delta rules, titans, omeganet beside the XLA engine and PyTorch's libraries; d = 64, then 128 | 0.55 |
| training | steps of titans-340m, with kernels first | 0.6 |
| tune | `atlasjax tune` | 0.7 |
| rest | forward passes, and what was not compiled in time | 1 |

A row is written to `--out` when it is measured, so that a run that is stopped keeps what it has: `machine.json`, `checks.jsonl`
(errors of each kernel), `compiled.jsonl` (seconds of each check and compilation), `kernels_measured.jsonl`,
`training_measured.jsonl` and `log.txt`. Programs stay in `--scratch`, from which the same command goes on.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FASTEST = ROOT / "atlasjax/memory/fast_weights/fastest.json"
# The most telling first: what the presets run.
LINEAR = ("kda", "gated_delta_rule", "delta_rule", "gla", "rwkv7")  # quick to compile
BOUNDED = ("titans_bounded", "omeganet_bounded")
OPERATIONS = (
    *LINEAR, *BOUNDED, "titans", "omeganet", "newton_schulz", "newton_schulz_gram", "dla_bounded", "dla", "atlas",
)  # fmt: skip
WITHOUT_KERNEL = ("ttt_linear",)
PARTS = ("machine", "kernels", "times", "training", "tune", "rest")
DIMS = (64, 128)
ATTENTION = ("attention", "attention_cudnn")
PRESET = "titans-340m"
# XLA tunes its products on the one GPU: of 14 processes at once, those of deep memories were not done after 220 s on an H100.
_MOST_PROCESSES = 5


@dataclasses.dataclass(frozen=True)
class Job:
    """A process. `operation`: whose kernel it is the first to run."""

    arguments: tuple[str, ...]
    operation: str = ""

    @property
    def name(self) -> str:
        return " ".join(str(word).rpartition("/")[2] for word in self.arguments)


class Run:
    """The parts' processes, their output and the time that is left."""

    def __init__(self, out: pathlib.Path, scratch: pathlib.Path, seconds: float, small: bool):
        self.out, self.scratch, self.small, self.shown = out, scratch, small, 10
        self.end = time.monotonic() + seconds
        for folder in (out, scratch / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        self.log = (out / "log.txt").open("a")
        self.environment = os.environ | {
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "JAX_COMPILATION_CACHE_DIR": str(scratch / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "ATLASJAX_CACHE": str(scratch / "atlasjax"),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        # The CPU computes the definitions in float64.
        self.environment.setdefault("JAX_PLATFORMS", "cuda,cpu")
        # PyTorch runs in the same process and takes its own.
        self.environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def say(self, text: str) -> None:
        """Writes to the log, and in short to the terminal."""
        print(text, file=self.log, flush=True)
        first, *lines = text.strip().splitlines()
        lines = [line for line in lines if line.strip() and not set(line) & set("┃│━─")]
        print("\n".join(line[:200] for line in [first, *lines[-self.shown :]]), flush=True)

    def start(self, job: Job, output: int | None = None, **environment: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *job.arguments], cwd=ROOT, env=self.environment | environment, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def alone(self, seconds: float, *arguments: object) -> None:
        """Runs one process for at most some seconds. Its output is printed and kept."""
        job, started = Job(tuple(map(str, arguments))), time.monotonic()
        path = self.scratch / "logs" / "alone.txt"
        with path.open("wb") as file:
            process = self.start(job, file.fileno())
            try:
                process.wait(max(1.0, min(seconds, self.left)))
            except subprocess.TimeoutExpired:
                stop(process)
        text = path.read_text(errors="replace")
        self.say(f"--- {job.name}: exit {process.returncode}, {time.monotonic() - started:.0f} s\n{text}")

    def together(self, jobs: Sequence[Job], seconds: float) -> list[str]:
        """Runs processes, a few at once. Returns the operations of those that did not end well."""
        ends, started = time.monotonic() + min(seconds, self.left), time.monotonic()
        waiting, bad = list(enumerate(jobs)), []
        running: dict[int, tuple[Job, subprocess.Popen[bytes], float]] = {}
        path = lambda number: self.scratch / "logs" / f"{number:03}.txt"
        most = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2))
        # They only compile, so each takes the memory that it needs. What a library finds out about its speed beside others is
        # of no use.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "FLA_CACHE_RESULTS": "0"}
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < most:
                number, job = waiting.pop(0)
                with path(number).open("wb") as file:
                    running[number] = job, self.start(job, file.fileno(), **environment), time.monotonic()
            for number, (job, process, began) in list(running.items()):
                if process.poll() is not None:
                    del running[number]
                    text = path(number).read_text(errors="replace")
                    self.say(f"--- {job.name}: exit {process.returncode}, {time.monotonic() - began:.0f} s\n{text}")
                    if process.returncode or "CUDA_ERROR" in text:
                        bad.append(job.operation)
            time.sleep(0.2)
        for number, (job, process, began) in running.items():
            stop(process)
            text = path(number).read_text(errors="replace")
            self.say(f"--- {job.name}: stopped after {time.monotonic() - began:.0f} s\n{text}")
            bad.append(job.operation)
        bad += [job.operation for _, job in waiting]
        for _, job in waiting:
            self.say(f"--- {job.name}: no time")
        self.say(f"{len(jobs)} processes, {most} at once, took {time.monotonic() - started:.0f} s")
        return list(dict.fromkeys(filter(None, bad)))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def machine(path: pathlib.Path, small: bool) -> None:
    """Writes the device, the versions and the measured ceilings."""
    import importlib.metadata

    import jax
    import jax.numpy as jnp

    names = ("jax", "jaxlib", "flax", "numpy", "torch", "triton", "fla-core", "titans-pytorch")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    row = {"devices": [device.device_kind for device in jax.devices()], "versions": versions}
    query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit"
    if shutil.which("nvidia-smi"):
        row["nvidia_smi"] = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        ).stdout.strip()
    size, numbers = (256, 2**20) if small else (8192, 2**31)
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (numbers,), jnp.bfloat16)

    def seconds(function, *arrays):
        run = jax.jit(function)
        jax.block_until_ready(run(*arrays))
        found = []
        for _ in range(10):
            started = time.perf_counter()
            for _ in range(10):
                out = run(*arrays)
            jax.block_until_ready(out)
            found.append((time.perf_counter() - started) / 10)
        return sorted(found)[5]

    row["product_teraflops"] = round(2 * size**3 / seconds(jnp.matmul, a, b) / 1e12, 1)
    row["copy_terabytes_per_second"] = round(2 * 2 * numbers / seconds(lambda x: -x, x) / 1e12, 3)
    path.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row))


def sizes(small: bool) -> list[str]:
    return ["--tokens", "128", "--batch", "1", "--heads", "2", "--matrices", "2"] if small else []


def compilations(out: pathlib.Path, small: bool) -> list[Job]:
    """The processes of the part "kernels", in the order in which their results are wanted. Each checks what it compiles first."""
    kernels, training = str(HERE / "kernels_measured.py"), str(HERE / "training_measured.py")

    def job(operation: str, dim: int, *engines: str, directions: Sequence[str] = ("both",)) -> Job:
        words = ["--compile", "--checks", str(out / "checks.jsonl"), "--seconds-out", str(out / "compiled.jsonl")]
        words += ["--only", operation, "--dims", str(dim), "--directions", *directions, "--engines", *engines]
        whose = f"{operation} {dim}" if set(engines) & {"xla", "pallas_gpu"} else engines[-1]
        return Job((kernels, *words, *sizes(small)), whose)

    # Kernels first, one process for each of those that take long.
    jobs = [job(name, DIMS[0], "pallas_gpu") for name in (*BOUNDED, *LINEAR)]
    steps = [Job((training, "--compile", *training_sizes(small), "--only", case)) for case in training_cases(small)]
    jobs += steps[:1] + [job(name, DIMS[0], "xla", "fla", "titans_pytorch") for name in (*LINEAR, *BOUNDED)]
    jobs += [job("delta_rule", dim, *ATTENTION) for dim in DIMS]
    jobs += [job(name, DIMS[1], "pallas_gpu", "xla", "fla") for name in LINEAR]
    jobs += [job(name, DIMS[1], engine) for name in BOUNDED for engine in ("pallas_gpu", "xla")] + steps[1:2]
    jobs += [Job(("-m", "atlasjax", "tune", *command_sizes(small), "--seconds", "0"))]
    rest = [name for name in OPERATIONS if name not in (*LINEAR, *BOUNDED)]
    jobs += [job(name, DIMS[0], "pallas_gpu", "xla", "titans_pytorch") for name in rest] + steps[2:]
    jobs += [job(name, DIMS[0], "pallas_gpu", "xla", directions=("forward",)) for name in (*LINEAR, *BOUNDED)]
    return [steps[0], job("newton_schulz", DIMS[0], "xla")] if small else jobs


def training_cases(small: bool) -> list[str]:
    if small:
        return ["linear-attention-tiny/xla"]
    from experiments.benchmarks.training_measured import CASES

    return list(CASES)


def training_sizes(small: bool) -> list[str]:
    return ["--batch", "1", "--length", "64", "--rounds", "1"] if small else []


def command_sizes(small: bool) -> list[str]:
    words = ["--preset", "linear-attention-tiny" if small else PRESET, "--mesh.data", "1"]
    return [*words, "--data.batch-size", "16", "--accumulation", "1", *["--data.sequence-length", "64"] * small]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for results")
    parser.add_argument(
        "--scratch", type=pathlib.Path, default=pathlib.Path("/tmp/atlasjax_gpu"), help="folder to go on from"
    )
    parser.add_argument("--seconds", type=float, default=470.0, help="of the whole command")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the command")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--machine", type=pathlib.Path, help=argparse.SUPPRESS)  # the process of the first part
    return parser.parse_args()


def main() -> None:
    options = read_options()
    if options.machine is not None:
        return machine(options.machine, options.small)
    sys.path.insert(0, str(ROOT))
    run = Run(options.out.resolve(), options.scratch.resolve(), options.seconds, options.small)
    parts, small, out = options.parts, options.small, run.out
    if "machine" in parts:
        run.alone(40, HERE / "on_gpu.py", "--out", out, "--machine", out / "machine.json", *["--small"] * small)
    late: list[str] = []
    if "kernels" in parts:
        late = run.together(compilations(out, small), 0.4 * run.left)
        run.say(f"not compiled, or not to the end: {', '.join(late) or 'nothing'}")
    times = Times(run, late)
    if "times" in parts:
        for dim, share in zip(DIMS, (0.3, 0.36)):
            times.measure(share * run.left, dim, "both", [*LINEAR, *BOUNDED])
    if "training" in parts:
        words = ["--out", out / "training_measured.jsonl", *training_sizes(small), "--only", *training_cases(small)]
        run.alone(0.6 * run.left, HERE / "training_measured.py", *words)
    if "tune" in parts:
        run.alone(0.7 * run.left, "-m", "atlasjax", "tune", *command_sizes(small), "--seconds", 1 if small else 20)
    if "rest" in parts:
        times.measure(0.4 * run.left, DIMS[0], "forward", [*LINEAR, *BOUNDED])
        times.measure(0.8 * run.left, DIMS[0], "both", [*OPERATIONS, *WITHOUT_KERNEL])
        times.record()
    summary(run)


class Times:
    """`kernels_measured.py`, for what was compiled in time. late: the operations that were not, and "fla" if it was not."""

    def __init__(self, run: Run, late: Sequence[str]):
        from experiments.benchmarks.measured_cases import ENGINES

        self.run, self.late = run, late
        self.words = [HERE / "kernels_measured.py", "--out", run.out / "kernels_measured.jsonl", *sizes(run.small)]
        self.words += ["--checks", run.out / "checks.jsonl", "--repeats", 1 if run.small else 7]
        if "fla" in late:  # compiling its many variants would take the time of all others
            self.words += ["--engines", *(name for name in ENGINES if name != "fla")]

    def measure(self, seconds: float, dim: int, direction: str, names: Sequence[str]) -> None:
        # A part that failed may break the device for those after it in the same process.
        names = [name for name in names if f"{name} {dim}" not in self.late]
        if self.run.small:
            names = ["newton_schulz"] if dim == DIMS[0] else []
        words = ["--dims", dim, "--directions", direction, "--only", *names, "--seconds", max(1.0, seconds - 20)]
        if names and seconds > 1:
            self.run.alone(seconds, *self.words, *words)

    def record(self) -> None:
        """Of all that is finished, the table of the fastest."""
        for dim in DIMS[: 1 if self.run.small else None]:
            self.run.alone(20, *self.words, "--dims", dim, "--directions", "both", "--seconds", 0, "--record")
        shutil.copy(FASTEST, self.run.out / FASTEST.name)


def summary(run: Run) -> None:
    """Prints the results in short: the last lines of a long output are those that are read."""
    from experiments.benchmarks import measured_report
    from experiments.benchmarks.measured_cases import Case
    from experiments.rows import read_rows

    for line in measured_report.latest(read_rows(run.out / "kernels_measured.jsonl")).values():
        print(f"{Case(**line['case']).name}: {measured_report.summary(line['engines'])}")
    for line in read_rows(run.out / "training_measured.jsonl"):
        print({name: x for name, x in line.items() if name not in ("seconds", "sources", "jax", "device")})
    print(
        FASTEST.read_text() if FASTEST.stat().st_size < 4000 else f"{FASTEST.name} has {FASTEST.stat().st_size} bytes"
    )
    print(f"{run.left:.0f} s were left")


if __name__ == "__main__":
    main()
