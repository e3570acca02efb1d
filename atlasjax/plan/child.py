"""Runs a compiler in a child process, because it can crash its process."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

from atlasjax.plan import cuda, libtpu
from atlasjax.plan.compiled import Plan, rematerializations

_RESULT = "atlasjax plan: "

# The child's standard error is parsed for the partitioner's warnings, so they are turned on there.
_WARNINGS = {"TPU_STDERR_LOG_LEVEL": "1", "TPU_MIN_LOG_LEVEL": "1", "TF_CPP_MIN_LOG_LEVEL": "1"}


def run_in_child(module: str, request: dict[str, object], *, timeout: float = 1800) -> Plan:
    """Compiles in a child process, because a compiler can crash its process.

    Args:
      module: run as `python -P -m module`, so that modules in the working folder cannot shadow others. It reads the request with
        `read_request` and prints the result with `print_plan`.
      request: a JSON-serializable dictionary of any size.
      timeout: in seconds.

    Raises:
      ValueError: the child raised it, e.g. for a topology that the compiler does not know.
      RuntimeError: the compilation failed or timed out. The message contains the compiler's reason (out of memory, …).
    """
    command = [sys.executable, "-P", "-m", module]
    variables = {**os.environ, **cuda.environment(), **libtpu.environment(), **_WARNINGS}
    variables.pop("XLA_FLAGS", None)  # simulated CPU devices would only cost time
    home = str(pathlib.Path(__file__).parents[2])  # a child of a source tree imports that tree
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    try:
        child = subprocess.run(
            command,
            env=variables,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the compiler did not finish within {timeout:.0f} seconds.") from None
    for line in child.stdout.splitlines():
        if line.startswith(_RESULT):
            plan = Plan(**json.loads(line.removeprefix(_RESULT)))
            return dataclasses.replace(plan, rematerialized=rematerializations(child.stderr))
    reason = _reason(child.stderr)
    if reason.startswith("ValueError: "):
        raise ValueError(reason.removeprefix("ValueError: "))
    raise RuntimeError(f"the compiler failed with code {child.returncode}: {reason[:500]}")


def _reason(messages: str) -> str:
    """The line of a failed child's standard error that states the reason."""
    lines = [line for line in messages.splitlines() if line.strip() and not re.match(r"[IW]\d{4} ", line)]
    exhausted = [line for line in lines if "RESOURCE_EXHAUSTED" in line]
    # A failed check, which other lines follow as the process ends.
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (exhausted[:1] or raised[-1:] or fatal[:1] or lines[-1:] or ["no message"])[0]


def read_request() -> dict[str, Any]:
    """Reads the parent process's request from standard input (`run_in_child`)."""
    return json.load(sys.stdin)


def print_plan(plan: Plan) -> None:
    """Prints the plan for the parent process to read (`run_in_child`)."""
    print(_RESULT + json.dumps(dataclasses.asdict(plan)), flush=True)
