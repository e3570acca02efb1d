"""Brings the processes of a job together and compares their settings before jax connects them.

If a process is missing, jax waits for minutes and then aborts with a C++ stack. So process 0 first listens on the coordinator's
port itself. Every process reports to it, and all receive the same answer: which processes are missing, and what differs. Then jax
takes over the port.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, TypedDict, cast

_RETRY = 0.5  # seconds between two attempts to reach process 0
_REMIND = 15.0  # seconds between two lines about the processes that are still missing
_GRACE = 10.0  # seconds for the answer to arrive after process 0 has stopped waiting
_LONGEST = 2**22  # maximum bytes of a report
_STRANGERS = 64  # connections without a report at a time, besides those of the job
_REFUSED_NAMED = 20  # lines about them
_MOST = 2**24  # processes
_LONGEST_NAME = 255  # characters of a host's name
_NAMED = 4  # differences, processes and hosts named in one line


class Report(TypedDict):
    """The report of a process: its index, the number of processes that it expects, where it runs, and its facts."""

    process: int
    processes: int
    host: str
    pid: int
    facts: Mapping[str, object]


class Verdict(TypedDict):
    """The answer to all processes: the indices of those that are missing, what differs ("" if nothing), and all hosts."""

    missing: list[int]
    differences: str
    hosts: list[str]


class MissingProcessError(RuntimeError):
    """Some processes of a job did not arrive in time. Starting all processes again may succeed."""


def meet(
    coordinator: str, num_processes: int, process_id: int, facts: Mapping[str, object], *, timeout: float
) -> list[str]:
    """Waits for all processes of a job and compares their facts. All processes call this with the same first two arguments.

    Args:
      coordinator: "host:port", where process 0 listens. The port is free again afterwards.
      num_processes: number of processes.
      process_id: index of this process.
      facts: what must be the same in all processes, as JSON. Nested mappings are compared entry by entry.
      timeout: seconds to wait for the others.

    Returns:
      The host name of each process.

    Raises:
      ValueError: facts differ, two processes have the same index, or the coordinator's host or port cannot be used.
      MissingProcessError: some processes did not arrive in time.
    """
    report: Report = {
        "process": process_id,
        "processes": num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "facts": facts,
    }
    started = time.monotonic()
    if process_id == 0:
        verdict = asyncio.run(_listen(_listener(coordinator), num_processes, report, timeout))
    else:
        verdict = asyncio.run(_call(coordinator, report, started + timeout, timeout))
    if verdict["missing"]:
        raise MissingProcessError(_missing(verdict["missing"], num_processes, coordinator, timeout))
    if verdict["differences"]:
        raise ValueError(verdict["differences"])
    return list(verdict["hosts"])


def bind_address(coordinator: str, *, patience: float = 30.0) -> str | None:
    """The address on which the coordinator's service should listen: that of `coordinator`, if it belongs to this machine.

    Args:
      coordinator: "host:port".
      patience: seconds to wait for a host that does not resolve yet, as is common while a job is starting.

    Returns:
      "address:port", or None if the host is not an address of this machine: it belongs to another process, or is forwarded here.

    Raises:
      ValueError: the host does not resolve.
    """
    host, _, port = coordinator.rpartition(":")
    started = time.monotonic()
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if time.monotonic() - started >= patience:
                raise ValueError(
                    f"processes.coordinator is {coordinator!r}, whose host does not resolve ({error.strerror}; tried for "
                    f"{patience:g} s)."
                ) from None
            print(f"The coordinator's host {host!r} does not resolve yet; trying again.", file=sys.stderr, flush=True)
            time.sleep(min(5.0, patience))
    for family, kind, protocol, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
        return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
    return None


def _listener(coordinator: str) -> socket.socket:
    address = bind_address(coordinator)
    host, _, port = (address or f"[::]:{coordinator.rpartition(':')[2]}").rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"processes.coordinator is {coordinator!r}, where process 0 cannot listen ({error.strerror}). Give another port, or "
            "end the job that uses this one."
        ) from None
    return listener


async def _listen(listener: socket.socket, count: int, mine: Report, timeout: float) -> Verdict:
    """Process 0: collects the reports, compares them, and sends the result to all processes."""
    reports = {0: mine}
    twice: list[tuple[Report, Report]] = []
    callers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    complete = asyncio.Event()

    strangers = _Strangers(count)

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        report = await strangers.report(reader, writer)
        if report is None:
            return
        index = report["process"]
        before = reports.get(index)
        if before is not None and (before["host"], before["pid"]) != (report["host"], report["pid"]):
            twice.append((before, report))
        reports[index] = report
        callers.append((reader, writer))
        # One with another number of processes would wait for others than these.
        if twice or report["processes"] != count or len(reports) >= count:
            complete.set()

    server = await asyncio.start_server(receive, sock=listener, limit=_LONGEST)
    deadline = time.monotonic() + timeout
    if count == 1:
        complete.set()
    while not complete.is_set() and (left := deadline - time.monotonic()) > 0:
        try:
            await asyncio.wait_for(complete.wait(), min(_REMIND, left))
        except TimeoutError:
            absent = _named([str(index) for index in range(count) if index not in reports])
            print(f"Waiting for {count - len(reports)} of {count} processes: {absent}.", file=sys.stderr, flush=True)
    server.close()
    await strangers.turn_away()
    wrong = _same_index(*twice[0]) if twice else differences(reports)
    verdict: Verdict = {
        "missing": [] if wrong else [index for index in range(count) if index not in reports],
        "differences": wrong,
        "hosts": [reports[index]["host"] for index in sorted(reports)],
    }
    for _, writer in callers:
        writer.write(json.dumps(verdict).encode() + b"\n")
    # The callers close first, so that no connection keeps the port busy.
    if callers:
        await asyncio.wait([asyncio.create_task(_to_end(reader)) for reader, _ in callers], timeout=_GRACE)
    for _, writer in callers:
        writer.close()
    return verdict


class _Strangers:
    """Whoever calls process 0 and has not sent a report yet: a process of the job, or a port scanner, a browser, another program.

    One that sends something else, or nothing for too long, is sent away with a line; of too many, the one that came first.

    Args:
      count: number of processes of the job.
    """

    def __init__(self, count: int):
        self._most = count + _STRANGERS
        self._waiting: dict[asyncio.Task[bytes], None] = {}
        self._refused = 0
        self._over = False

    async def report(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Report | None:
        """The report of a caller. None if the caller is no process of the job, and is sent away."""
        line = asyncio.ensure_future(reader.readline())
        self._waiting[line] = None
        while len(self._waiting) > self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.cancel()
        try:
            await asyncio.wait([line], timeout=_GRACE)
            if not line.done():
                raise ValueError(f"it sent no report within {_GRACE:g} s")
            if line.cancelled():
                raise ValueError("it sent no report, and others came")
            return _report(line.result())
        except (ValueError, RecursionError, OSError) as error:
            self._refuse(writer, error)
            return None
        finally:
            self._waiting.pop(line, None)
            line.cancel()

    async def turn_away(self) -> None:
        """Ends what is left, when the job is complete."""
        self._over = True
        for line in self._waiting:
            line.cancel()
        await asyncio.sleep(0)

    def _refuse(self, writer: asyncio.StreamWriter, error: Exception) -> None:
        writer.transport.abort()  # what is not read is not waited for
        self._refused += 1
        if self._refused <= _REFUSED_NAMED and not self._over:
            peer = writer.get_extra_info("peername")
            more = " Others are not named." if self._refused == _REFUSED_NAMED else ""
            print(
                f"Process 0 sent away {peer[0] if peer else 'a caller'}, which is no process of this job: {error}; it goes on "
                f"waiting.{more}",
                file=sys.stderr, flush=True,
            )  # fmt: skip


def _report(line: bytes) -> Report:
    """A report as JSON. Raises ValueError if it is none."""
    found = _object(line)
    types = {"process": int, "processes": int, "host": str, "pid": int, "facts": dict}
    for name, kind in types.items():
        if type(found.get(name)) is not kind:  # True is no number of a process
            raise ValueError(f"its message has no {name!r} of type {kind.__name__}")
    if not 0 <= found["process"] < found["processes"] <= _MOST or len(found["host"]) > _LONGEST_NAME:
        raise ValueError("its message has an index or a host that cannot be")
    try:
        _entries(found["facts"])
    except RecursionError:
        raise ValueError("its message is nested too deeply") from None
    return cast(Report, found)


def _verdict(line: bytes) -> Verdict:
    """The answer of process 0 as JSON. Raises ValueError if it is none."""
    found = _object(line)
    if not isinstance(found.get("differences"), str):
        raise ValueError("what answers there is no process 0 of atlasjax")
    for name, kind in (("missing", int), ("hosts", str)):
        values = found.get(name)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ValueError("what answers there is no process 0 of atlasjax")
    return cast(Verdict, found)


def _object(line: bytes) -> dict[str, Any]:
    """A line's JSON object. Raises ValueError if it has none, or is not a whole line."""
    if not line.endswith(b"\n"):
        raise ValueError("its message ends in the middle" if line else "it sent nothing")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("its message is not a JSON object")
    return found


async def _to_end(reader: asyncio.StreamReader) -> None:
    """Reads until the other side closes, and keeps nothing of it."""
    with contextlib.suppress(OSError):
        while await reader.read(2**16):
            pass


async def _call(coordinator: str, report: Report, deadline: float, timeout: float) -> Verdict:
    """Any other process: reports to process 0 and returns its answer."""
    host, _, port = coordinator.rpartition(":")
    problem = ""
    while time.monotonic() < deadline:
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host.strip("[]"), int(port), limit=_LONGEST),
                max(deadline - time.monotonic(), 0.1),
            )
            try:
                writer.write(json.dumps(report).encode() + b"\n")
                left = deadline - time.monotonic() + _GRACE
                if line := await asyncio.wait_for(reader.readline(), left):
                    return _verdict(line)
                problem = "it ended"  # it may be started again
            finally:
                writer.close()
        except TimeoutError:
            problem = "no answer"
        except (OSError, ValueError) as error:
            problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        await asyncio.sleep(_RETRY)
    raise MissingProcessError(
        f"Process 0 could not be reached at {coordinator} within {timeout:g} s ({problem}). Start one process on every host, all "
        "with the same command, and let them reach that port."
    )


def differences(reports: Mapping[int, Report]) -> str:
    """One line that names what differs between process 0 and others; "" if nothing does.

    Args:
      reports: process → its report: "host", "processes", and "facts".
    """
    first = reports[0]
    expected = dict(_entries({"num_processes": first["processes"], **first["facts"]}))
    parts = []
    for index in sorted(reports):
        found = dict(_entries({"num_processes": reports[index]["processes"], **reports[index]["facts"]}))
        for name in dict.fromkeys([*expected, *found]):
            if expected.get(name) != found.get(name):
                where = f"process {index} ({reports[index]['host']})"
                parts.append(
                    f"{name} is {_short(found.get(name))} in {where} and {_short(expected.get(name))} in process 0"
                )
    if not parts:
        return ""
    return f"The processes of this job differ: {_named(parts, '; ')}. Start all of them with the same command, code and data."


def _entries(facts: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            entries += _entries(value, f"{prefix}{name}.")
        else:
            entries.append((f"{prefix}{name}", value))
    return entries


def _same_index(one: Report, other: Report) -> str:
    return (
        f"Two processes have the index {one['process']}: {one['pid']} on {one['host']} and {other['pid']} on {other['host']}. "
        "Give each its own processes.process_id, from 0."
    )


def _missing(missing: list[int], count: int, coordinator: str, timeout: float) -> str:
    are = "process" if len(missing) == 1 else "processes"
    return (
        f"{len(missing)} of {count} processes did not arrive within {timeout:g} s: {are} "
        f"{_named([str(index) for index in missing])}. Start one process on every host, all with the same command, and let them "
        f"reach {coordinator}."
    )


def _named(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return separator.join(names[:_NAMED]) + more


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
