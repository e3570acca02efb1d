"""Chat templates come with weights of others, so they are rendered in processes that can be ended: one may loop for ever.

A process is started when a template is there, and stays for the next text. Jinja's sandbox keeps a template from the machine;
limits of time, of memory and of the text's length keep it from exhausting the machine.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from atlasjax.serve import template_child
from atlasjax.serve.template_child import SIZE

SECONDS = 5.0  # for a text; a usual template takes a millisecond
_START_SECONDS = 60.0  # for Python and Jinja on a busy machine
_MOST = 2**23  # characters of a text
_SPARE_SECONDS = 1.0  # after which a process ends itself
_VARIABLES = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


class RenderingError(ValueError):
    """A template has an error, or does not end in time. The message is one line."""


class Renderer:
    """A template that is rendered in other processes. Several threads may use it; each gets a process of its own.

    Args:
      template: its source.

    Attributes:
      reads: the names of the variables that the template uses.

    Raises:
      ImportError: jinja2 is not installed.
      RenderingError: the source is not a template.
    """

    def __init__(self, template: str):
        self._template = template
        self.reads: frozenset[str] = frozenset()
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._idle.append(self._started())

    def render(self, variables: dict[str, Any]) -> str:
        """The text for some variables, which are values of JSON.

        Raises:
          RenderingError: as the class says.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or not process.is_alive:
            process = self._started()
        answer = process.ask(variables, SECONDS)
        with self._lock:
            self._idle.append(process)
        return _checked(answer)["text"]

    def _started(self) -> "_Process":
        process = _Process()
        self.reads = frozenset(_checked(process.ask({"template": self._template}, SECONDS))["reads"])
        return process


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise RenderingError(answer["error"])
    return answer


class _Process:
    """A process that has no template yet. It ends with the last reference to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                # No variable of the server, such as its token, and no signal of its terminal.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(pathlib.Path(template_child.__file__))],
                    stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, start_new_session=True,
                    env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
                )  # fmt: skip
            except OSError as error:
                self._socket.close()
                raise RenderingError(f"its process cannot be started ({error.strerror})") from None
        self.end = weakref.finalize(self, _end, self._process, self._socket)
        path = [one for one in sys.path if one]
        answer = self.ask({"path": path, "seconds": SECONDS + _SPARE_SECONDS, "most": _MOST}, _START_SECONDS)
        if "missing" in answer:
            raise ImportError(answer["missing"])

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self.end.alive and self._process.poll() is None

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer. If there is none in time, the process is ended. Raises RenderingError."""
        deadline = time.monotonic() + seconds
        content = json.dumps(question).encode()
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(SIZE.pack(len(content)) + content)
            (size,) = SIZE.unpack(self._received(SIZE.size, deadline))
            return json.loads(self._received(size, deadline))
        except TimeoutError:
            self.end()
            raise RenderingError(f"it takes longer than {seconds:g} s") from None
        except (OSError, EOFError):
            self.end()
            raise RenderingError("its process has ended") from None
        except BaseException:  # such as a signal: what comes next would be the answer to this question
            self.end()
            raise

    def _received(self, size: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._socket.recv(min(size - len(found), 2**20))
            if not part:
                raise EOFError
            found += part
        return bytes(found)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    process.wait()
    connection.close()
