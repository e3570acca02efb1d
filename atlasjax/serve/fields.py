"""The fields of a request in the shape of OpenAI's API, each of one class: served, without effect here, or refused.

A test asks the installed client for its fields, so that one which is new there is given a class here.
"""

from collections.abc import Collection, Mapping
from typing import Any

from atlasjax.names import lookup

_SHARED: dict[str, tuple[type, ...]] = {
    "model": (str,), "stream": (bool,), "stream_options": (dict,), "temperature": (int, float), "top_p": (int, float),
    "top_k": (int,), "min_p": (int, float), "repetition_penalty": (int, float), "seed": (int,), "stop": (str, list),
    "max_tokens": (int,), "memory": (str,), "memory_from": (str,),
}  # fmt: skip
SERVED: dict[bool, dict[str, tuple[type, ...]]] = {
    False: _SHARED | {"prompt": (str, list)},
    True: _SHARED | {"messages": (list,), "max_completion_tokens": (int,), "chat_template_kwargs": (dict,)},
}
"""Fields that are served, and their types: of completions (False), and of chats (True)."""

WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "user": (), "safety_identifier": (), "metadata": ({},), "store": (False,), "service_tier": ("auto", "default"),
    "prompt_cache_key": (), "prompt_cache_options": ({},), "prompt_cache_retention": (), "prediction": (),
    "parallel_tool_calls": (True, False),
}  # fmt: skip
"""Fields on which no text depends: who asks, how urgent it is, what the service keeps, how it may be faster. They are accepted with
any value, and named in the answer, unless the value is one of those given here, which ask for nothing."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "suffix": ("",), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "audio": (), "moderation": (), "reasoning_effort": ("none",), "verbosity": ("medium",),
    "web_search_options": (), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"),
}  # fmt: skip
"""Fields that would change the answer. They are accepted only with a value that changes nothing."""

# With "none" for the second, the first may not be used.
_UNUSED = {"tools": "tool_choice", "functions": "function_call"}
STREAM_OPTIONS = ("include_usage", "include_obfuscation")
_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class RequestError(Exception):
    """A request that is refused.

    Attributes:
      status: of HTTP.
      message: what is wrong, for the user.
      param: the field, if it is one.
      code: a short name of the error.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, object]:
        """In OpenAI's shape."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(name: str, value: object, what: str) -> RequestError:
    """The error for a value that must be `what`."""
    return RequestError(400, f"{name} is {value!r:.200}; it must be {what}.", param=name)


def check_unicode(name: str, text: str) -> None:
    """Raises RequestError for a text with a lone surrogate, which JSON can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(400, f"{name} is not valid Unicode at character {error.start}.", param=name) from None


def checked(given: Mapping[str, Any], *, chat: bool) -> tuple[dict[str, Any], list[str]]:
    """The fields that are served, each of a right type, and the names of those that were given and have no effect.

    Raises:
      RequestError: a field is unknown, of a wrong type, or would change the answer and is not served.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    served, ignored = SERVED[chat], []
    for name, value in fields.items():
        if name in WITHOUT_EFFECT:
            ignored += [] if _is_one_of(value, WITHOUT_EFFECT[name]) else [name]
        elif name in _UNUSED and fields.get(_UNUSED[name]) == "none":
            ignored += [name] if value else []
        elif name in NEUTRAL:
            if not _is_one_of(value, NEUTRAL[name]):
                raise RequestError(400, f"{name} is {value!r:.200}; this server does not have it.", param=name)
        else:
            _check_type(name, value, served)
    options, more = _stream_options(fields.get("stream_options", {}))
    found = {name: value for name, value in fields.items() if name in served} | {"stream_options": options}
    return found, ignored + more


def _is_one_of(value: object, neutral: Collection[object]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _check_type(name: str, value: object, served: Mapping[str, tuple[type, ...]]) -> None:
    try:
        kinds = lookup("field", name, served)
    except ValueError as error:
        param = name[:100].encode(errors="backslashreplace").decode()  # JSON can escape what is no Unicode
        raise RequestError(400, str(error)[:500], param=param) from None
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise wrong(name, value, " or ".join(_WORDS[kind] for kind in kinds if kind is not int or float not in kinds))


def _stream_options(options: dict[str, object]) -> tuple[dict[str, bool], list[str]]:
    """The options, and those without effect. No obfuscation is added to a stream, which OpenAI's server adds by default."""
    for name, value in options.items():
        if name not in STREAM_OPTIONS:
            raise wrong("stream_options", options, f"an object with the fields {' and '.join(STREAM_OPTIONS)} only")
        if value is not None and not isinstance(value, bool):
            raise wrong(f"stream_options.{name}", value, "true or false")
    found = {name: options.get(name) is True for name in STREAM_OPTIONS}
    return found, ["stream_options.include_obfuscation"] if found["include_obfuscation"] else []
