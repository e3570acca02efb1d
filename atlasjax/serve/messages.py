"""The messages of a chat request. Anything but text is refused by name, and never left out."""

from collections.abc import Mapping
from typing import Any

from atlasjax.serve.chat import Message
from atlasjax.serve.fields import RequestError, check_unicode, wrong

ROLES = ("system", "developer", "user", "assistant")
MESSAGE = ("role", "content", "name")
PART = ("type", "text")
BREAKPOINT = "prompt_cache_breakpoint"  # of a part: how far a cache should reach


def messages_of(given: list[Any] | None) -> tuple[list[Message], list[str]]:
    """The messages, and the names of fields without effect.

    Raises:
      RequestError: there are none, or one has something that is not text.
    """
    if not given:
        raise wrong("messages", given, "a list of messages")
    found, ignored = [], []
    for i, message in enumerate(given):
        at = f"messages[{i}]"
        if not isinstance(message, dict):
            raise wrong(at, message, "an object with a role and a content")
        if message.get("role") not in ROLES:
            raise wrong(f"{at}.role", message.get("role"), f"{', '.join(map(repr, ROLES[:-1]))} or {ROLES[-1]!r}")
        _check_rest(at, message, MESSAGE)
        content, name = message.get("content"), message.get("name")
        if isinstance(content, list):
            ignored += [
                f"messages.content.{BREAKPOINT}" for part in content if isinstance(part, dict) and part.get(BREAKPOINT)
            ]
            content = "".join(_text(f"{at}.content[{j}]", part) for j, part in enumerate(content))
        if not isinstance(content, str):
            raise wrong(f"{at}.content", content, "a text, or a list of parts that are texts")
        if not isinstance(name, str | None):
            raise wrong(f"{at}.name", name, "a text")
        check_unicode(f"{at}.content", content)
        check_unicode(f"{at}.name", name or "")
        found.append(Message(message["role"], content, name))
    return found, list(dict.fromkeys(ignored))


def _text(at: str, part: object) -> str:
    """The text of a part of a message."""
    if not isinstance(part, dict):
        raise wrong(at, part, "an object with the type 'text' and a text")
    if part.get("type", "text") != "text":
        raise RequestError(400, f"{at} is of the type {part['type']!r:.100}; this server reads text only.", param=at)
    _check_rest(at, part, (*PART, BREAKPOINT))
    if not isinstance(part.get("text"), str):
        raise wrong(f"{at}.text", part.get("text"), "a text")
    return part["text"]


def _check_rest(at: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Clients send messages back as they came, with empty fields."""
    for name, value in given.items():
        if name not in known and value:
            param = f"{at}.{name[:100]}".encode(errors="backslashreplace").decode()
            raise RequestError(400, f"{param} is {value!r:.200}; this server does not have it.", param=param)
