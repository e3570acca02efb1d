"""Requests, connections, templates and folders that a server of a tiny model meets: odd numbers and types in every field, headers
and bodies that are not whole, chat templates that fail, odd files among the memories.

Every request is answered with its own status, 2xx or 4xx, and one line; afterwards the server answers a good one as before. Only
this process is asked, and little at a time.
"""

import contextlib
import http.client
import json
import os
import pathlib
import random
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.generate import ContextFiles, read, save_context
from atlasjax.nn import LanguageModel
from atlasjax.serve import BatchConfig, Batcher, Worker
from atlasjax.serve.chat import Message, PlainChat, TemplateChat
from atlasjax.serve.limits import Limits
from atlasjax.serve.memories import Memories
from experiments.faults import damage, small
from experiments.faults.run import Case, case, some

_TOKEN = "a-secret"
_GOOD: dict[str, Any] = {"model": "tiny", "prompt": "the ", "max_tokens": 2, "temperature": 0}
_FIELDS = (
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stream", "memory", "memory_from",
    "repetition_penalty", "logprobs", "echo", "model", "stream_options", "best_of", "messages", "unknown",
)  # fmt: skip
_VALUES = (
    "1" + "0" * 20, "1" + "0" * 400, "1e400", "-1e400", "NaN", "Infinity", "-0.0", "-1", "0.5", '"5"', '""', "true", "null", "[]",
    "{}", "[[[[]]]]", '"\\ud800"', '"../x"', '["a", 3]', "[1e400]",
)  # fmt: skip
_BODIES: dict[str, bytes] = {
    "nothing": b"", "no JSON": b"{", "a list": b"[]", "a number": b"1" + b"0" * 5000, "deep": b"[" * 2000 + b"]" * 2000,
    "deep objects": b'{"a":' * 1500 + b"1" + b"}" * 1500, "not UTF-8": b"\xff\xfe{}", "zero bytes": b"\0" * 64,
    "a key twice": b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', "large": b'{"prompt": "' + b"a" * 100_000 + b'"}',
}  # fmt: skip
_STARTS: dict[str, bytes] = {
    "half a line": b"POST /v1/comp", "half a header": b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-",
    "no body": b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n", "nothing": b"",
    "not HTTP": b"\x16\x03\x01\x02\x00" * 9, "a long line": b"GET /" + b"a" * 70_000,
    "a length that is none": b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1e9\r\n\r\n",
    "a huge length": b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: " + b"9" * 21 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000,
}  # fmt: skip
_TEMPLATES: dict[str, str] = {
    "division by zero": "{{ 1 // 0 }}", "remainder by zero": "{{ 7 % 0 }}", "true division": "{{ 1 / 0 }}",
    "a power of zero": "{{ 0 ** -1 }}", "too large for a float": "{{ 2.0 ** 5000 }}", "of an integer": "{{ (10 ** 400) * 1.5 }}",
    "many digits": "{{ 10 ** 5000 }}", "no such message": "{{ messages[99].content }}", "none plus one": "{{ none + 1 }}",
    "a type": "{{ 'a' + 1 }}", "an attribute": "{{ messages[0].a.b }}", "a filter": "{{ 'a' | int(base=99) }}",
    "a format": "{{ '%d' | format('x') }}", "a range": "{% for i in range(10 ** 9) %}{% endfor %}", "a key": "{{ {}['a'] }}",
    "no function": "{{ missing() }}", "dunder": "{{ ''.__class__.__mro__ }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "its own refusal": "{{ raise_exception('no') }}", "encoding": "{{ '\\ud800' }}",
    "loops that take for ever": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}  # fmt: skip


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Each field with each value, each body and each start of a request, each template, each odd file."""
    rng = random.Random(seed)
    model = LanguageModel(small.MODEL, rngs=nnx.Rngs(0))
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        with _serving(model, folder / "memories") as port:
            paths = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/nothing")
            every = [
                *(case(f"{field} = {value[:24]}", _field, port, field, value) for field in _FIELDS for value in _VALUES),
                *(case(f"{path}, {name}", _answered, port, path, body) for name, body in _BODIES.items() for path in paths),
                *(case(f"connections with {name}", _started, port, start) for name, start in _STARTS.items()),
                *(case(f"template: {name}", _template, template) for name, template in _TEMPLATES.items()),
                *(case(f"memories: {kind}", _memories, model, folder / "odd", make) for kind, make in _ODD.items()),
                *(case(f"memory file {kind.__name__}", _damaged, model, folder / "odd", damage.on("x.memory", kind, rng))
                  for kind in damage.FILE),
            ]  # fmt: skip
            yield from some(every, most, rng)


@contextlib.contextmanager
def _serving(model: LanguageModel, folder: pathlib.Path) -> Iterator[int]:
    """A server in a thread: its port."""
    from atlasjax.serve import app, server

    batcher = Batcher(model, ByteTokenizer(), BatchConfig(slots=2, queue=8, pieces=(16,)))
    batcher.warm_up()  # no request waits for a compilation
    memories = Memories(ContextFiles(model), folder)
    limits = Limits(max_tokens=16, seconds=30, body_bytes=20_000)
    hosts = frozenset({"127.0.0.1"})
    service = app.Service(
        Worker(batcher), ByteTokenizer(), "tiny", PlainChat(), memories, limits, app.Access(_TOKEN, hosts)
    )
    opened, address = server.listen(server.Address("127.0.0.1", 0))
    ready = threading.Event()
    running = server.Server(service, grace_seconds=1.0, ready=ready.set)
    thread = threading.Thread(target=running.run, args=([opened],), daemon=True)
    thread.start()
    if not ready.wait(300):
        raise TimeoutError("the server did not start")
    try:
        yield address.port
    finally:
        running.should_exit = True
        thread.join(30)


def _asked(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=50)
    headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"}
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def _answered(port: int, path: str, body: bytes) -> str:
    status, content = _asked(port, path, body)
    if 200 <= status < 300:
        return "right"
    message = json.loads(content)["error"]["message"] if 400 <= status < 500 else ""
    if not message or len(message.splitlines()) != 1:
        raise AssertionError(f"status {status}: {content[:200]!r}")
    return _still_well(port, "refused")


def _field(port: int, field: str, value: str) -> str:
    good = {key: inside for key, inside in _GOOD.items() if key != field}
    body = json.dumps(good)[:-1] + f', "{field}": {value}}}'
    return _answered(port, "/v1/chat/completions" if field == "messages" else "/v1/completions", body.encode())


def _still_well(port: int, how: str) -> str:
    return how if _asked(port, "/v1/completions", json.dumps(_GOOD).encode())[0] == 200 else "wrong"


def _started(port: int, start: bytes) -> str:
    """Some connections that begin like this and are left so: others are answered in the meantime, and these are closed at last."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=50)) for _ in range(8)]
        for connection in opened:
            with contextlib.suppress(OSError):  # the server may have had enough before the end
                connection.sendall(start)
        if _still_well(port, "refused") != "refused":
            return "wrong"
        for connection in opened:
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):  # a timeout is an error: the connection stays open for ever
                    pass
    return "refused"


def _template(source: str) -> str:
    said = lambda: TemplateChat(source, {"bos_token": "<s>"}).text([Message("user", "a")])
    return small.refused(said, ("template",), right=lambda text: isinstance(text, str))


_ODD: dict[str, Callable[[pathlib.Path], object]] = {
    "a dead link": lambda path: path.symlink_to(path.parent / "nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "an empty file": lambda path: path.touch(),
    "a text": lambda path: path.write_text("x"),
    "a file nobody may read": lambda path: path.touch(mode=0),
    "from the future": lambda path: (path.touch(), os.utime(path, (2**33, 2**33))),
    "before 1970": lambda path: (path.touch(), os.utime(path, (-1, -1))),
}


def _memories(model: LanguageModel, folder: pathlib.Path, make: Callable[[pathlib.Path], object]) -> str:
    """A server starts beside such a file, saves and loads other memories, and refuses this one."""
    damage.gone(folder)
    folder.mkdir()
    make(folder / "x.memory")
    memories = Memories(ContextFiles(model), folder)
    memories.save("good", read(model, [[1, 2]]))
    if memories.load("good") is None or "good" not in {entry.name for entry in memories.entries()}:
        return "wrong"
    return small.refused(lambda: memories.load("x"), ("memory 'x'",), right=lambda found: found is None)


def _damaged(model: LanguageModel, folder: pathlib.Path, harm: Callable[[pathlib.Path], None]) -> str:
    damage.gone(folder)
    folder.mkdir()
    save_context(model, read(model, [[1, 2]]), folder / "x.memory")
    harm(folder)
    memories = Memories(ContextFiles(model), folder)
    return small.refused(lambda: memories.load("x"), ("memory 'x'",), right=lambda found: found is None)
