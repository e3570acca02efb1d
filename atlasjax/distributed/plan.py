"""Ahead-of-time compilation for TPU topologies, with libtpu as the compiler and without a TPU."""

import collections
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from atlasjax.names import lookup

# GiB of memory per device available to programs, taken from libtpu's out-of-memory messages.
HBM_GIB = {"v5e": 15.75, "v6e": 31.25, "v5p": 95.74, "tpu7x": 94.75}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_GATHER = re.compile(r" = (?:\(.*[ (])?([a-z0-9]+\[[\d,]*\])[^ ]* all-gather(?:-start)?\(")
_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization\. (The compiler .*?)(?:, metadata=|\. As the last|$)", re.M
)
_RESULT = "atlasjax plan: "

# libtpu reads these when it is loaded. They silence it, let several processes use it at once, and keep jax on the CPU.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# A child process's output is parsed, so there the partitioner's warnings are turned on.
_WARNINGS = {"TPU_STDERR_LOG_LEVEL": "1", "TPU_MIN_LOG_LEVEL": "1"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compiler's report on a program for a topology. Bytes are per device. Nothing here is a measured speed.

    Attributes:
      topology: e.g. "v5e:16x16".
      devices: number of devices in the topology.
      mesh: axis → size.
      argument_bytes: the training state and the batch.
      temp_bytes: activations, gradients and the compiler's buffers.
      output_bytes: results, of which alias_bytes reuse the memory of donated arguments.
      alias_bytes: see output_bytes.
      code_bytes: the program's code.
      flops: matmul FLOPs of one call on all devices, with every scan iteration counted (`flops.count_flops`).
      collectives: kind → occurrences in the program's text. A collective inside a loop is counted once.
      kernels: calls of Pallas kernels in the program's text.
      gathers: type of an all-gather's result, e.g. "bf16[1024,8000]" → occurrences. The shape is that on one device.
      rematerialized: the partitioner's warnings about arrays that it could reshard only by copying them whole to every device
        ("involuntary full rematerialization"), each once.
      compile_seconds: compilation time on this machine.
    """

    topology: str
    devices: int
    mesh: dict[str, int]
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    code_bytes: int
    flops: int
    collectives: dict[str, int]
    kernels: int
    gathers: dict[str, int]
    compile_seconds: float
    rematerialized: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Memory needed per device: arguments, temporaries, code, and results that do not reuse an argument."""
        return self.argument_bytes + self.temp_bytes + self.code_bytes + self.output_bytes - self.alias_bytes

    @property
    def available_bytes(self) -> int:
        """Memory per device available to programs on this topology."""
        return int(HBM_GIB[self.topology.partition(":")[0]] * 2**30)

    @property
    def fits(self) -> bool:
        """Whether the program fits into a device's memory."""
        return self.total_bytes <= self.available_bytes


def topology_devices(topology: str) -> Sequence[jax.Device]:
    """The devices of a TPU topology, as compilation targets.

    Args:
      topology: "v5e:16x16", "v5p:8x8x8", "v6e:16x16", "tpu7x:4x4x4", …

    Raises:
      ValueError: libtpu is not installed, or the generation or topology is unknown.
    """
    check_topology(topology)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except Exception as error:  # jax raises several types here
        raise ValueError(
            f"topology is {topology!r}, which libtpu does not know: {str(error).splitlines()[0]}"
        ) from None


def check_topology(topology: str) -> None:
    """Checks a topology's name, as far as that is possible without loading libtpu.

    Raises:
      ValueError: libtpu is not installed, or the generation is unknown.
    """
    generation, _, shape = topology.partition(":")
    lookup("TPU generation", generation, HBM_GIB)
    if not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise ValueError(f"topology is {topology!r}; it should be like v5e:16x16 or v5p:8x8x8.")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "Planning for a TPU needs its compiler, libtpu: pip install 'jax[tpu]' in the version of your jax."
        )


def low_effort() -> dict[str, Any]:
    """Compiler options for fast compilation. The memory they report is in practice an upper bound."""
    if jax.__version_info__ >= (0, 11):
        return {"optimization_level": "O0"}
    return {"exec_time_optimization_effort": -1.0}


def collective_counts(text: str) -> dict[str, int]:
    """Number of occurrences of each collective operation in a compiled program's text."""
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in _COLLECTIVES}


def kernel_count(text: str) -> int:
    """Number of Pallas kernel calls in a compiled program's text."""
    return text.count('custom_call_target="tpu_custom_call"')


def gathers(text: str) -> dict[str, int]:
    """The result types of the all-gathers in a compiled program's text, each with its number of occurrences."""
    return dict(collections.Counter(_GATHER.findall(text)))


def rematerializations(messages: str) -> tuple[str, ...]:
    """The partitioner's warnings in the child's standard error (`Plan.rematerialized`)."""
    return tuple(dict.fromkeys(_REMATERIALIZED.findall(messages)))


def run_in_child(module: str, request: dict[str, Any], *, timeout: float = 1800) -> Plan:
    """Compiles in a child process, because libtpu can crash its process.

    Args:
      module: run as `python -P -m module`, so that no module of the working folder takes the place of another; it takes the request
        with `read_request` and calls `print_plan`.
      request: serializable as JSON, of any size.
      timeout: in seconds.

    Raises:
      RuntimeError: the compilation failed. The message contains the compiler's own (out of memory, …).
    """
    command = [sys.executable, "-P", "-m", module]
    environment = {**os.environ, **_ENVIRONMENT, **_WARNINGS}
    environment.pop("XLA_FLAGS", None)  # simulating CPU devices would only cost time
    home = str(pathlib.Path(__file__).parents[2])  # a child of a source tree imports that tree
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    try:
        child = subprocess.run(
            command,
            env=environment,
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
    raise RuntimeError(f"the compiler failed with code {child.returncode}: {_reason(child.stderr)[:500]}")


def _reason(messages: str) -> str:
    """The line of a failed child's standard error that gives the reason."""
    lines = [line for line in messages.splitlines() if line.strip() and not re.match(r"[IW]\d{4} ", line)]
    exhausted = [line for line in lines if "RESOURCE_EXHAUSTED" in line]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (exhausted[:1] or raised[-1:] or lines[-1:] or ["no message"])[0]


def read_request() -> dict[str, Any]:
    """The request of the parent process (`run_in_child`)."""
    return json.load(sys.stdin)


def print_plan(plan: Plan) -> None:
    """Prints the plan for the parent process to read (`run_in_child`)."""
    print(_RESULT + json.dumps(dataclasses.asdict(plan)), flush=True)
