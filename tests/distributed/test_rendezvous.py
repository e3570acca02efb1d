"""Processes meet, and say who is missing or what differs, before jax connects them."""

import concurrent.futures
import contextlib
import json
import socket
import time

import pytest

from atlasjax.distributed import rendezvous
from atlasjax.distributed.rendezvous import MissingProcessError, meet


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outcomes(facts, *, present=None, counts=None, timeout=5.0, coordinator=None, indices=None):
    """What `meet` returns or raises in each process; each process is a thread here."""
    coordinator = coordinator or f"127.0.0.1:{free_port()}"

    def one(place):
        try:
            index = place if indices is None else indices[place]
            count = len(facts) if counts is None else counts[place]
            return meet(coordinator, count, index, facts[place], timeout=timeout)
        except (ValueError, RuntimeError) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(one, range(len(facts)) if present is None else present))


def test_all_processes_meet_and_know_the_hosts():
    assert outcomes([{"steps": 3}] * 3) == [[socket.gethostname()] * 3] * 3


def test_one_process_alone():
    assert outcomes([{}]) == [[socket.gethostname()]]


def test_the_port_is_free_afterwards():
    coordinator = f"127.0.0.1:{free_port()}"
    for _ in range(2):
        outcomes([{}, {}], coordinator=coordinator)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        listener.bind(("127.0.0.1", int(coordinator.rpartition(":")[2])))


def test_all_are_told_who_is_missing():
    started = time.monotonic()
    found = outcomes([{}] * 4, present=[0, 2], timeout=1.0)
    assert time.monotonic() - started < 8
    for error in found:
        assert isinstance(error, MissingProcessError)
        assert "2 of 4 processes did not arrive within 1 s: processes 1, 3. Start one process on every host" in str(
            error
        )


def test_process_0_is_missing():
    (error,) = outcomes([{}] * 2, present=[1], timeout=1.0)
    assert isinstance(error, MissingProcessError)
    assert "Process 0 could not be reached at 127.0.0.1:" in str(error)


def test_a_process_that_comes_before_process_0_waits_for_it():
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet, coordinator, 2, 1, {}, timeout=20.0)
        time.sleep(1.0)
        assert meet(coordinator, 2, 0, {}, timeout=20.0) == early.result()


def test_all_are_told_what_differs():
    facts = {"versions": {"jax": "1"}, "config": {"steps": 3, "data": {"seed": 0}}}
    other = {"versions": {"jax": "2"}, "config": {"steps": 3, "data": {"seed": 1}}}
    for error in outcomes([facts, other, facts]):
        assert isinstance(error, ValueError)
        assert str(error) == (
            f"The processes of this job differ: versions.jax is '2' in process 1 ({socket.gethostname()}) and '1' in process 0; "
            f"config.data.seed is 1 in process 1 ({socket.gethostname()}) and 0 in process 0. Start all of them with the same "
            "command, code and data."
        )


def test_another_number_of_processes_is_a_difference_at_once():
    started = time.monotonic()
    found = outcomes([{}, {}], counts=[3, 2], timeout=30.0)
    assert time.monotonic() - started < 15
    assert all("num_processes is 2 in process 1" in str(error) and "3 in process 0" in str(error) for error in found)


def test_two_processes_with_one_index(monkeypatch):
    hosts = iter(["a", "b", "c"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(hosts))
    found = outcomes([{}] * 3, indices=[0, 1, 1], timeout=10.0)
    assert sum("Two processes have the index 1" in str(error) for error in found) >= 2


REPORT = {"process": 1, "processes": 2, "host": "a", "pid": 5, "facts": {}}
WRONG = {
    "process": [True, -1, 2, 10**30, "1", None, 1.0], "processes": ["2", True, 10**30], "host": [5, "a" * 300, None],
    "pid": ["5", None], "facts": [[], "facts", 3, None],
}  # fmt: skip


def test_strangers_on_the_port_are_sent_away(capsys, monkeypatch):
    """Each with a line, and process 0 goes on waiting."""
    monkeypatch.setattr(rendezvous, "_REFUSED_NAMED", 100)
    nested = b'{"a": ' * 5000 + b"1" + b"}" * 5000
    messages = [b"GET / HTTP/1.1\r\n\r\n", b"\n", b'{"process": 1}\n', b"[1]\n", b"", b"\xff\xfe\n", b'{"process": 1']
    messages += [
        nested + b"\n",
        b"[" * 100_000 + b"\n",
        b"x" * (2**22 + 1),
        json.dumps(REPORT).encode(),
    ]  # the last has no end
    messages += [
        json.dumps({**REPORT, name: value}).encode() + b"\n" for name, values in WRONG.items() for value in values
    ]
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, coordinator, 2, 0, {}, timeout=60.0)
        for said in messages:
            with retry(coordinator) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                stranger.recv(1)  # nothing: it is closed
        assert meet(coordinator, 2, 1, {}, timeout=60.0) == first.result()
    said = capsys.readouterr().err
    assert said.count("Process 0 sent away 127.0.0.1, which is no process of this job") == len(messages)
    assert "Traceback" not in said


def test_facts_that_are_nested_deeply_are_refused_or_compared():
    for depth in range(800, 1100, 10):
        facts = b'{"a": ' * depth + b"1" + b"}" * depth
        try:
            report = rendezvous._report(json.dumps(REPORT).encode().replace(b"{}", facts) + b"\n")
        except ValueError:
            continue
        assert "The processes of this job differ" in rendezvous.differences({0: REPORT, 1: report})


def test_strangers_who_say_nothing_keep_nobody_out(capfd, monkeypatch):
    monkeypatch.setattr(rendezvous, "_GRACE", 1.0)
    monkeypatch.setattr(rendezvous, "_STRANGERS", 4)
    monkeypatch.setattr(rendezvous, "_REFUSED_NAMED", 100)
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as open_ones:
        first = pool.submit(meet, coordinator, 2, 0, {}, timeout=60.0)
        for number in range(30):
            stranger = open_ones.enter_context(retry(coordinator))
            stranger.sendall(b'{"process"' if number % 2 else b"{")
        ended = time.monotonic() + 30
        while "sent no report within 1 s" not in (said := capfd.readouterr().err):
            assert time.monotonic() < ended
            time.sleep(0.1)
        assert meet(coordinator, 2, 1, {}, timeout=60.0) == first.result()
    assert "Traceback" not in said + capfd.readouterr().err


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"[]\n", b'{"missing": 5}\n', b"{" * 5000 + b"\n"])
def test_another_program_in_the_place_of_process_0(answer):
    with socket.create_server(("127.0.0.1", 0)) as other, concurrent.futures.ThreadPoolExecutor(1) as pool:
        port = other.getsockname()[1]
        called = pool.submit(meet, f"127.0.0.1:{port}", 2, 1, {}, timeout=0.8)
        with contextlib.suppress(TimeoutError):
            other.settimeout(2.0)
            while not called.done():
                with other.accept()[0] as caller:
                    caller.recv(100)
                    caller.sendall(answer)
        with pytest.raises(MissingProcessError, match="Process 0 could not be reached at"):
            called.result()


def retry(coordinator: str) -> socket.socket:
    host, _, port = coordinator.rpartition(":")
    for _ in range(50):
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise AssertionError("nobody listens")


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        coordinator = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(
            ValueError, match=r"where process 0 cannot listen \(Address already in use\)\. Give another port"
        ):
            meet(coordinator, 2, 0, {}, timeout=1.0)
