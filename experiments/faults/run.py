"""A generated attack on the library: damaged and hostile files, bad command lines, bad calls, hard inputs, processes that end.

    JAX_PLATFORMS=cpu python -m experiments.faults.run                     # all classes, one after another
    JAX_PLATFORMS=cpu python -m experiments.faults.run --only calls        # one class

Every case ends in one of these ways, of which the last four are failures:

    right      the result is what it would be without the damage, bit for bit
    fell back  an older checkpoint was used, and what it holds is what was saved
    refused    an error of one line that the library foresaw (exit code 1 or 2; TypeError or ValueError of a call)
    wrong      a result that is another one, or a bad argument that was taken
    traceback  any other error
    gave up    older checkpoints were intact, and none was used
    hang       no end within a minute (ten of a case that compiles much or starts processes)

Rows, one for each class, are lines of results/faults.jsonl; cases that failed are printed. The same seed makes the same cases.
"""

import argparse
import atexit
import collections
import functools
import importlib
import pathlib
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from experiments.rows import append_row

HERE = pathlib.Path(__file__).parent
CLASSES = (
    "checkpoints", "folders", "commands", "calls", "trust", "others", "texts", "server", "amounts", "weights", "arrays", "hard",
    "gradients", "programs", "processes", "versions",
)  # fmt: skip
FAILURES = ("wrong", "traceback", "gave up", "hang")
SECONDS = 60

Case = tuple[str, Callable[[], str]]  # its name, and what makes its outcome
T = TypeVar("T")


def case(name: str, made: Callable[..., str], *arguments: Any) -> Case:
    """A case whose outcome a function makes of these arguments."""
    return name, functools.partial(made, *arguments)


def some(every: Sequence[T], most: int | None, rng: random.Random) -> Sequence[T]:
    """So many of them at random; all without a number."""
    return every if most is None else rng.sample(every, most)


class WrongError(Exception):
    """A result that is another one; it says by how much."""


class Slow:
    """A case that may take ten times as long as others: it starts processes of its own."""

    def __init__(self, case: Callable[[], str]):
        self.case = case

    def __call__(self) -> str:
        return self.case()


class _HangError(BaseException):
    """Not an Exception: nothing on the way may swallow it."""


def outcome(case: Callable[[], str]) -> tuple[str, str]:
    """How a case ends: (one of the outcomes, the error if there was one)."""

    def stop(*_: object) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS * (10 if isinstance(case, Slow) else 1))
    try:
        return case(), ""
    except _HangError:
        return "hang", ""
    except WrongError as error:
        return "wrong", str(error)
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:600]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _share_compilations() -> None:
    """Runs that go on after damage compile the same step as those before: it is compiled once."""
    folder = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def attack(cases: Iterator[Case], *, quiet: bool = False) -> dict[str, int]:
    """Runs cases and counts their outcomes; prints those that failed."""
    counts: collections.Counter[str] = collections.Counter()
    for name, case in cases:
        how, error = outcome(case)
        counts[how] += 1
        if how in FAILURES and not quiet:
            print(f"  {how}: {name} {error}", flush=True)
    return dict(counts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CLASSES, default=CLASSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=None, help="cases of each class; all without it")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    failed = 0
    _share_compilations()
    for name in options.only:
        started = time.perf_counter()
        counts = attack(importlib.import_module(f"experiments.faults.{name}").cases(options.seed, options.most))
        row: dict[str, Any] = {"class": name, "cases": sum(counts.values()), "outcomes": counts, "seed": options.seed}
        append_row(options.out / "faults.jsonl", {**row, "seconds": round(time.perf_counter() - started)})
        print(
            f"{name}: {row['cases']} cases: {', '.join(f'{n} {how}' for how, n in sorted(counts.items()))}", flush=True
        )
        failed += sum(counts.get(how, 0) for how in FAILURES)
    return int(failed > 0)


if __name__ == "__main__":  # under its own name: the classes import `Slow` and `WrongError` from there
    raise SystemExit(importlib.import_module("experiments.faults.run").main())
