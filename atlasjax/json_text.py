"""JSON from files and arguments: one way to read it, whose errors are one line."""

import json
from typing import Any

_DEEPEST = 100  # levels of objects and lists; what is read here has about ten


def parse(content: bytes | str, what: str, *, once: bool = False) -> Any:
    """The value of a text of JSON.

    Args:
      content: the text; bytes are UTF-8, -16 or -32.
      what: where it is from, such as a file's name in quotes. It begins the message.
      once: whether an object with the same key twice is refused. Otherwise the last one counts.

    Raises:
      ValueError: it is not JSON, or is nested more than 100 levels deep, which could exhaust the stack of what walks through it.
    """
    try:
        value = json.loads(content, object_pairs_hook=_without_repetition if once else None)
    except _RepeatedError as error:
        raise ValueError(f"{what} has the key {error.args[0]!r:.100} twice; it should have it once.") from None
    except RecursionError:
        raise _too_deep(what) from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}.") from None
    if is_deep(value):
        raise _too_deep(what)
    return value


def is_deep(value: object) -> bool:
    """Whether a value of JSON is nested more than 100 levels deep, too deep for what walks through it."""
    level = [value]  # by levels, not by recursion, which is what a deep value would exhaust
    for _ in range(_DEEPEST + 1):
        nested = [one for one in level if isinstance(one, dict | list)]
        level = [x for one in nested for x in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return True


class _RepeatedError(Exception):
    """An object has a key twice."""


def _too_deep(what: str) -> ValueError:
    return ValueError(f"{what} is not JSON that can be read: it is nested more than {_DEEPEST} levels deep.")


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedError(key)
        found[key] = value
    return found
