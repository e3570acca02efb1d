"""The processes of a job: joining them, and detecting that one has ended."""

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import jax

from atlasjax import check
from atlasjax.distributed import rendezvous
from atlasjax.names import causes


@dataclasses.dataclass(frozen=True)
class ProcessConfig:
    """Settings of a job with several processes, one per host or per device (`jax.distributed`).

    On Cloud TPU pods, Slurm, Open MPI and Kubernetes `distributed=True` is enough, because jax detects the rest.

    Attributes:
      distributed: start `jax.distributed`.
      coordinator: "host:port" of process 0. None lets jax detect it.
      num_processes: number of processes. None lets jax detect it.
      process_id: index of this process. None lets jax detect it.
      timeout: seconds to wait for the other processes when the job starts.
      heartbeat: seconds without a sign of life after which jax ends the job, ≥ 1: for a machine or a network that is gone, or a
        process that hangs. A process that ends is noticed at once. Smaller values may end a job on a machine that is only slow.
      stall: seconds without progress, ≥ 1, after which the process that the others wait for is named, with what it is doing.
    """

    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    timeout: int = 300
    heartbeat: int = 100
    stall: int = 60

    def __post_init__(self) -> None:
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            inside = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16
            check.require(inside, "processes.coordinator", self.coordinator, '"host:port", as in "10.0.0.1:1234"')
        count, index = self.num_processes, self.process_id
        check.require(count is None or check.is_integer(count, 1), "processes.num_processes", count, "at least 1")
        inside = index is None or (check.is_integer(index, 0) and (count is None or index < count))
        check.require(inside, "processes.process_id", index, "at least 0, and below num_processes")
        check.require(check.is_integer(self.timeout, 1), "processes.timeout", self.timeout, "at least 1")
        check.require(check.is_integer(self.heartbeat, 1), "processes.heartbeat", self.heartbeat, "at least 1")
        check.require(check.is_integer(self.stall, 1), "processes.stall", self.stall, "at least 1")


def initialize(config: ProcessConfig, facts: Mapping[str, object] | None = None) -> list[str]:
    """Joins the other processes if the config asks for it. Must run before anything touches a device.

    From then on SIGTERM, which announces the end of a preemptible machine, is received by jax's preemption service instead of a
    handler of Python's (see `preemption_service`).

    Args:
      config: the processes.
      facts: what must be the same in all processes, as JSON (see `train.preflight`); compared before they are connected.

    Returns:
      The host name of each process; empty if the config asks for none, or jax was initialized before.

    Raises:
      ValueError: some of coordinator, num_processes and process_id are given, but `distributed` is off or they are not all given;
        jax detects no cluster; the coordinator's address cannot be used; or facts differ.
      rendezvous.MissingProcessError: some processes did not arrive within `config.timeout`.
    """
    given = {
        name: value
        for name, value in (
            ("coordinator", config.coordinator),
            ("num_processes", config.num_processes),
            ("process_id", config.process_id),
        )
        if value is not None
    }
    if not config.distributed:
        if given:
            raise ValueError(f"{', '.join(given)} given, but distributed is False; set distributed to True.")
        return []
    if given and len(given) < 3:
        raise ValueError(
            f"coordinator, num_processes and process_id belong together; got only {', '.join(given)}. Give all three, "
            "or none where jax can detect them (TPU pods, Slurm, Open MPI, Kubernetes)."
        )
    if jax.distributed.is_initialized():
        return []
    coordinator, count, index, local_devices = _place(config)
    hosts = rendezvous.meet(coordinator, count, index, facts or {}, timeout=config.timeout)
    # Collectives between CPU processes. Must be set before the backend is created; TPU and GPU ignore it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        local_devices,
        initialization_timeout=config.timeout,
        heartbeat_timeout_seconds=config.heartbeat,
        coordinator_bind_address=rendezvous.bind_address(coordinator) if index == 0 else None,
    )
    return hosts


class KeyValueStore(Protocol):
    """The part of jax's `DistributedRuntimeClient` that is used here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


def key_value_store() -> KeyValueStore | None:
    """The job's key-value store. None in a job of one process."""
    from jax._src import distributed  # jax has no public name for it

    return distributed.global_state.client


def _place(config: ProcessConfig) -> tuple[str, int, int, Sequence[int] | None]:
    """Returns (coordinator, number of processes, index of this one, its devices or None for all), as jax would detect them."""
    from jax._src import clusters  # jax has no public name for it, and detects only while it connects

    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        config.coordinator, config.num_processes, config.process_id, None, None, config.timeout
    )
    coordinator, count, index, local_devices = found
    if coordinator is None or count is None or index is None:
        raise ValueError(
            "processes.distributed is True, and jax finds no cluster here (TPU pod, Slurm, Open MPI, Kubernetes). Give "
            "coordinator, num_processes and process_id."
        )
    return coordinator, count, index, local_devices


def preemption_service() -> bool:
    """Whether jax's preemption service receives SIGTERM in this job.

    Then `multihost_utils.reached_preemption_sync_point` lets all processes stop after the same step. The environment variable
    JAX_ENABLE_PREEMPTION_SERVICE=0 switches it off.
    """
    return jax.distributed.is_initialized() and bool(jax.config.jax_enable_preemption_service)  # type: ignore[attr-defined]


_LOST = re.compile(
    r"gloo|connection (closed|reset|refused)|connection to .* (lost|closed)|socket closed|heartbeat|coordination (service|agent)"
    r"|nccl|barrier timed out",
    re.IGNORECASE,
)


def lost_process(error: BaseException) -> str | None:
    """The message of an error that was caused by the loss of another process, or None for any other error.

    If a process ends, collectives of the others fail with the transport's error, which other errors may have wrapped ("Saving the
    checkpoint failed: …"): the message is that of the innermost one.
    """
    found = None
    for cause in causes(error):
        lines = (line for line in str(cause).splitlines() if _LOST.search(line))
        found = next((line.strip()[:200].rstrip(". ") for line in lines), found)
    return found


@contextlib.contextmanager
def aborts_explained(message: Callable[[], str], code: int) -> Iterator[None]:
    """Within it, an abort of this process prints a message and exits with a code of ours.

    jax's coordination service aborts a process when another one is lost. jax 0.10.2 has no way to replace that, and Python runs no
    handler for SIGABRT, since `abort` does not return to it. So the handler is one of C, which calls Python. Not on Windows.

    Args:
      message: what to print as the last line. It runs while the process is ending, on any thread.
      code: the exit code.
    """
    if sys.platform == "win32":
        yield
        return

    def explain(_: int) -> None:
        try:
            os.write(2, f"atlasjax: {message()}\n".encode())
        finally:
            os._exit(code)

    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)
