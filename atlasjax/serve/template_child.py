"""Renders the chat template of somebody else's weights, in a process of its own that `serve.rendering` starts and may end.

It imports nothing of this library. It reads questions from its input and answers each: JSON after its length. A template gets no
more memory here than it is given, and no more time, even if the process that asked has ended meanwhile.

Templates are written for `transformers` (`utils/chat_template_utils.py`, 5.24), and find here what they find there.
"""

import contextlib
import datetime
import importlib.metadata
import json
import re
import resource
import signal
import struct
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import jinja2

_MEMORY = 2**29  # bytes of addresses
_LEAST = [3, 1, 6]  # version of Jinja
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

        self._most, self._error = most, jinja2.TemplateError
        self._environment = _environment()
        self._template: jinja2.Template | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """{"text": …} or {"error": …}: what the template or its author has done wrong is no error of ours.

        The question that brings the template is answered with {"reads": the names of the variables that it uses}.
        """
        try:
            if self._template is None:
                import jinja2.meta

                parsed = self._environment.parse(question["template"])
                self._template = self._environment.from_string(question["template"])
                return {
                    "reads": sorted(jinja2.meta.find_undeclared_variables(parsed) - self._environment.globals.keys())
                }
            return {"text": self._text(question)}
        except self._error as error:
            said = str(error)
        except MemoryError:
            said = "it needs too much memory"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        return {"error": " ".join(_unicode(said[:_LONGEST]).split()).rstrip(".")}

    def _text(self, variables: dict[str, Any]) -> str:
        assert self._template is not None
        parts, length = [], 0
        for part in self._template.generate(variables):
            length += len(part)
            if length > self._most:
                raise self._error(f"its text has more than {self._most:,} characters")
            parts.append(part)
        text = "".join(parts)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._error(f"its text has U+{ord(text[error.start]):04X}, which is no character") from None
        return text


def _unicode(text: str) -> str:
    """A text in which lone surrogates, which have no UTF-8, are escapes."""
    return text.encode(errors="backslashreplace").decode()


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON. Jinja's own filter escapes what means something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> "jinja2.Environment":
    """The sandbox, with the extensions, filters and functions that templates are written for.

    Raises:
      ImportError: there is no Jinja, or one from whose sandbox there are known ways out.
    """
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    found = importlib.metadata.version("jinja2")
    if [int(part) for part in re.findall(r"\d+", found)[:3]] < _LEAST:
        raise ImportError(f"jinja2 is {found}; it must be {'.'.join(map(str, _LEAST))} or later")

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} around what a model answers, which is marked for training and is text here.

        The body is a call block, so that what is set in it ends with it.
        """

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body, lineno=line)

        def _body(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        def __setitem__(self, name: str, value: object) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: object) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has the name {name!r}, which begins with '_'")

    def namespace(*given: Any, **named: Any) -> Namespace:
        found = dict(*given, **named)
        for name in found:
            _check(name)
        return Namespace(found)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": raise_exception, "strftime_now": _strftime_now, "namespace": namespace
    }  # fmt: skip
    return environment


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    size = stream.read(SIZE.size)
    return json.loads(stream.read(*SIZE.unpack(size))) if size else None


def _write(stream: BinaryIO, answer: dict[str, str]) -> None:
    content = json.dumps(answer).encode()
    stream.write(SIZE.pack(len(content)) + content)
    stream.flush()


if __name__ == "__main__":
    main()
