"""Renders the chat template of somebody else's weights, in a process of its own that `serve.rendering` starts and may end.

It imports nothing of this library. It reads questions from its input and answers each: JSON after its length. A template gets no
more memory here than it is given, and no more time, even if the process that asked has ended meanwhile.
"""

import contextlib
import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

_MEMORY = 2**29  # bytes of addresses
_LONGEST = 500  # characters of what is said about an error
SIZE = struct.Struct("<Q")


def main() -> None:
    """Answers until the input ends: first {"path", "seconds", "most"}, then {"template"}, then the variables of each rendering."""
    for limit, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # not every system has them
            resource.setrlimit(limit, (most, most))
    given, said = sys.stdin.buffer, sys.stdout.buffer
    settings = _read(given) or sys.exit()
    sys.path[:] = settings["path"]
    try:
        template = _Template(settings["most"])
    except ImportError as error:
        _write(said, {"missing": str(error)})
        return
    _write(said, {})
    while (question := _read(given)) is not None:
        # Nothing handles the signal, so it ends this process. A handler would wait for the end of a long operation.
        signal.setitimer(signal.ITIMER_REAL, settings["seconds"])
        answer = template.answer(question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(said, answer)


class _Template:
    """A template, which the first question brings.

    Args:
      most: characters of a text.
    """

    def __init__(self, most: int):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        self._most, self._error = most, jinja2.TemplateError
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._environment.globals["raise_exception"] = refuse
        self._template: jinja2.Template | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, str]:
        """{"text": …} or {"error": …}: what the template or its author has done wrong is no error of ours."""
        try:
            if self._template is None:
                self._template = self._environment.from_string(question["template"])
                return {"text": ""}
            return {"text": self._text(question)}
        except self._error as error:
            said = str(error)
        except MemoryError:
            said = "it needs too much memory"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        return {"error": " ".join(said[:_LONGEST].split()).rstrip(".")}

    def _text(self, variables: dict[str, Any]) -> str:
        assert self._template is not None
        parts, length = [], 0
        for part in self._template.generate(variables):
            length += len(part)
            if length > self._most:
                raise self._error(f"its text has more than {self._most:,} characters")
            parts.append(part)
        return "".join(parts)


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    size = stream.read(SIZE.size)
    return json.loads(stream.read(*SIZE.unpack(size))) if size else None


def _write(stream: BinaryIO, answer: dict[str, str]) -> None:
    content = json.dumps(answer).encode()
    stream.write(SIZE.pack(len(content)) + content)
    stream.flush()


if __name__ == "__main__":
    main()
