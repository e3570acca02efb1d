"""Loss of one of two processes that train together: it is killed after a checkpoint, or a little later.

The other process ends with one line of ours in bounded time, and the same commands, given again, end with the parameters of two
processes that were never disturbed, bit for bit.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from atlasjax.cli import TRY_AGAIN
from atlasjax.train import load_run
from experiments.faults import small
from experiments.faults.run import Case, Slow, some

_STEPS, _EVERY = 400, 100
# From the loss of one process to the end of the other. A collective fails at once; one that waits for the other's part of a
# checkpoint ends when that gives no sign of life for `--processes.heartbeat` seconds, 100 by default (docs/reliability.md).
_MOST_SECONDS = 120
_PATIENCE = 300  # for what is compiled by two processes on a busy machine


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Each process, after each checkpoint but the last one, at once and after some steps."""
    rng = random.Random(seed)
    every = list(itertools.product((0, 1), range(_EVERY, _STEPS, _EVERY), (False, True)))
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        (folder / "text.txt").write_text(small.TEXT * 60)
        _ended(_started(folder, "whole"))
        expected = small.params(load_run(folder / "whole").model)
        for victim, step, late in some(every, most, rng):
            delay = rng.random() * 0.2 if late else 0.0
            name = f"process {victim} after step {step}{f' and {delay:.2f} s' if late else ''}"
            yield name, Slow(functools.partial(_lost, folder, expected, victim, step, delay))


def _started(folder: pathlib.Path, name: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    options = [
        *("train", "--preset", "linear-attention-tiny", "--model.dim", "16", "--model.num-layers", "1", "--model.num-heads", "2"),
        *("--model.mlp-dim", "32", "--data.source", "text", "--data.paths", str(folder / "text.txt"), "--mesh.data", "2"),
        *("--data.sequence-length", "16", "--data.batch-size", "8", "--eval-every", "0", "--checkpoint-every", str(_EVERY)),
        *("--steps", str(_STEPS), "--no-tensorboard", "--run-dir", str(folder / name), "--processes.distributed"),
        *("--processes.coordinator", address, "--processes.num-processes", "2", "--processes.process-id"),
    ]  # fmt: skip
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    with_pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with_pipes["env"] = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "atlasjax", *options]
    return [subprocess.Popen([*command, str(index)], **with_pipes) for index in range(2)]


def _ended(processes: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for process in processes:
        process.communicate(timeout=_PATIENCE)
    return processes


def _lost(folder: pathlib.Path, expected: object, victim: int, step: int, delay: float) -> str:
    run_dir = folder / f"lost-{victim}-{step}-{delay}"
    processes = _started(folder, run_dir.name)
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        until = time.monotonic() + _PATIENCE
        while not (run_dir / f"checkpoints/{step}").is_dir():
            if time.monotonic() > until or any(process.poll() for process in processes):
                raise AssertionError("the run did not come so far")
            time.sleep(0.01)
        time.sleep(delay)
        processes[victim].kill()
        started = time.monotonic()
        other = processes[1 - victim]
        _, said = other.communicate(timeout=_PATIENCE)
        seconds = time.monotonic() - started
    lines = [line for line in said.splitlines() if line.startswith("atlasjax: ")]
    finished = (run_dir / f"checkpoints/{_STEPS}").is_dir()
    if not finished and (other.returncode != TRY_AGAIN or len(lines) != 1 or seconds > _MOST_SECONDS):
        raise AssertionError(f"exit code {other.returncode} after {seconds:.0f} s: {said[-300:]!r}")
    if any(process.returncode for process in _ended(_started(folder, run_dir.name))):
        raise AssertionError("the same commands did not end well")
    return "right" if small.same(small.params(load_run(run_dir).model), expected) else "wrong"
