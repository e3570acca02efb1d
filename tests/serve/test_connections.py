"""Clients that are slow, silent or hostile, on real sockets; the model has no part in it."""

import asyncio
import contextlib
import http.client
import importlib
import json
import resource
import socket
import threading
import time

import pytest

from atlasjax.serve.limits import Limits

NEEDS = "needs the extra 'serve' (starlette, uvicorn)"
for name in ("starlette", "uvicorn"):
    pytest.importorskip(name, reason=NEEDS)
app, web, connections, loading = (
    importlib.import_module(f"atlasjax.serve.{name}") for name in ("app", "server", "connections", "loading")
)


async def answers(scope, receive, send):
    """/much: more than any buffer holds; /wait: late; /body: the body's size; others: at once, the body unread."""
    body = b"fine"
    if scope["path"] == "/wait":
        await asyncio.sleep(600)
    if scope["path"] == "/body":
        more, size = True, 0
        while more:
            message = await receive()
            more, size = message.get("more_body", False), size + len(message.get("body", b""))
        body = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000 * (scope["path"] == "/much")):
        await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def serving(application=answers, **limits):
    """(port, the server) of a server in a thread."""
    opened, address = web.listen(web.Address("127.0.0.1", 0))
    server = web.HttpServer(application, Limits(**limits), lifespan="off", grace_seconds=1)
    thread = threading.Thread(target=server.run, args=([opened],))
    thread.start()
    try:
        yield address.port, server
    finally:
        server.should_exit = True
        thread.join()


def connected(stack, port):
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))


def get(port, path="/", method="GET", body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()


def rest(client):
    """What comes until the end."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(2**16):
            found += part
    return found


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "this never happened"
        time.sleep(0.02)


def test_half_open_connections_keep_nobody_out():
    """However many: the oldest make room."""
    with serving(connections=20) as (port, server), contextlib.ExitStack() as stack:
        for number in range(300):
            client = connected(stack, port)
            client.sendall([b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n", b"\r\n\r\n"][number % 4])
            if number % 50 == 49:
                assert get(port) == (200, b"fine")
        assert len(server.server_state.connections) <= 22


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: a\r\n", b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET"])
def test_a_request_has_a_deadline(sent, caplog):
    """Whether the client sends nothing more, or a byte now and then."""
    with serving(client_seconds=1.0) as (port, server), contextlib.ExitStack() as stack:
        silent, trickling = (connected(stack, port) for _ in range(2))
        for client in (silent, trickling):
            client.sendall(sent)
        until(lambda: len(server.server_state.connections) == 2)
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < begun + 30 and server.server_state.connections:
                trickling.sendall(b"x: y\r\n" if sent and sent[-1:] == b"\n" else b"G")
                time.sleep(0.1)
        assert 0.5 < time.monotonic() - begun < 30
        said = rest(silent)
        if not sent.endswith(b"GET"):
            assert said.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
        until(lambda: not server.server_state.connections)
    assert "Traceback" not in caplog.text


def test_a_body_that_is_refused_and_never_ends(caplog):
    """The answer does not read it. Then what is no chunk: there is no place for another answer."""
    with serving(client_seconds=1.0) as (port, server), contextlib.ExitStack() as stack:
        for more in (b"1\r\nx\r\n", b"no chunk\r\n"):
            client = connected(stack, port)
            client.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
            with contextlib.suppress(ConnectionError):
                client.sendall(more)
            until(lambda: not server.server_state.connections)
    assert "Traceback" not in caplog.text


def test_a_client_that_does_not_read_is_left():
    with serving(client_seconds=1.0) as (port, server), contextlib.ExitStack() as stack:
        client = connected(stack, port)
        client.sendall(b"GET /much HTTP/1.1\r\nhost: a\r\n\r\n")
        until(lambda: server.server_state.connections)
        until(lambda: not server.server_state.connections)
        # One that reads slowly is not.
        client = connected(stack, port)
        client.sendall(b"GET /much HTTP/1.1\r\nhost: a\r\n\r\n")
        begun, size = time.monotonic(), 0
        while time.monotonic() < begun + 3:
            size += len(client.recv(2**20))
            time.sleep(0.05)
        assert len(server.server_state.connections) == 1
        assert size


def test_requests_in_progress_are_not_closed_for_others():
    with serving(connections=2, client_seconds=1.0) as (port, server), contextlib.ExitStack() as stack:
        waiting = [connected(stack, port) for _ in range(2)]
        for client in waiting:
            client.sendall(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
        until(lambda: len(server.server_state.tasks) == 2)
        status, body = get(port)
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
        time.sleep(1.5)
        assert len(server.server_state.tasks) == 2  # a deadline of clients is none of the server
        waiting[0].close()


def test_headers_of_a_megabyte():
    with serving() as (port, _), contextlib.ExitStack() as stack:
        client = connected(stack, port)
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 2**20 + b"\r\n\r\n")
        rest(client)
        assert get(port, "/body", "POST", b"z" * 2**20) == (200, b"%d" % 2**20)


def test_while_a_model_is_loaded_clients_are_told(capsys, monkeypatch):
    monkeypatch.setattr(loading, "_QUIET_SECONDS", 0.0)
    opened, address = web.listen(web.Address("127.0.0.1", 0))
    access = app.Access("a-secret", frozenset({"127.0.0.1"}))
    with loading.answering(opened, address.url, access, Limits()) as report:
        status, body = get(address.port, "/health")
        assert (status, json.loads(body)) == (503, {"status": "loading", "doing": "loading the model"})
        assert get(address.port, "/v1/models")[0] == 401
        report("compiling a step of 4 texts (2 of 3)")
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
        connection.request("POST", "/v1/completions", b"{}", {"authorization": "Bearer a-secret"})
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert (response.status, response.headers["retry-after"], error["code"]) == (503, "1", "loading")
        assert error["message"] == "the server is not ready yet; it is compiling a step of 4 texts (2 of 3)."
        connection.close()
    said = capsys.readouterr().err
    assert f"atlasjax: loading the model; {address.url} answers with status 503 until it is ready.\n" in said
    assert "atlasjax: compiling a step of 4 texts (2 of 3)\n" in said
    # A client that comes before the next server waits for it.
    with contextlib.ExitStack() as stack:
        early = connected(stack, address.port)
        early.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        server = web.HttpServer(answers, Limits(), lifespan="off", grace_seconds=1)
        thread = threading.Thread(target=server.run, args=([opened],))
        thread.start()
        assert rest(early).endswith(b"fine\r\n0\r\n\r\n")
        server.should_exit = True
        thread.join()


def test_room_for_connections():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        connections.make_room(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 356
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
