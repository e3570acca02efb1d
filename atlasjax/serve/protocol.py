"""Requests and responses in the shape of OpenAI's API."""

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from atlasjax.generate import SamplingConfig
from atlasjax.names import lookup
from atlasjax.serve.chat import Message

_MOST_STOPS = 16
_COMPLETION_TOKENS = 16  # the default of this endpoint in OpenAI's API
_SHARED: dict[str, tuple[type, ...]] = {
    "model": (str,), "stream": (bool,), "stream_options": (dict,), "temperature": (int, float), "top_p": (int, float),
    "top_k": (int,), "min_p": (int, float), "repetition_penalty": (int, float), "seed": (int,), "stop": (str, list),
    "max_tokens": (int,), "memory": (str,), "memory_from": (str,), "user": (str,), "metadata": (dict,), "store": (bool,),
}  # fmt: skip
_COMPLETION = _SHARED | {"prompt": (str, list)}
_CHAT = _SHARED | {"messages": (list,), "max_completion_tokens": (int,)}
# Fields of OpenAI's API that are accepted only with the value that changes nothing.
_ONLY = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "suffix": ("",), "response_format": ({"type": "text"},),
}  # fmt: skip
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


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A request's body, checked.

    Attributes:
      prompt: a text, token ids, or the messages of a conversation.
      max_tokens: most tokens to generate.
      has_max_tokens: whether the request says so; if not, fewer will do where the text has no room for more.
      memory: the name under which the text goes on and is kept.
      memory_from: the name whose text goes on instead.
      include_usage: whether a stream ends with the numbers of tokens.
    """

    prompt: str | list[int] | list[Message]
    max_tokens: int
    has_max_tokens: bool
    sampling: SamplingConfig
    seed: int
    stop: tuple[str, ...]
    memory: str | None
    memory_from: str | None
    stream: bool
    include_usage: bool


def parse(body: bytes, *, chat: bool, model: str, most_tokens: int) -> Parsed:
    """Checks a request's body.

    Args:
      body: JSON.
      chat: whether it is one of /v1/chat/completions.
      model: the name of the model that is served.
      most_tokens: most tokens of an answer.

    Raises:
      RequestError: the body is not such a request.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON ({error}).") from None
    if not isinstance(given, dict):
        raise RequestError(400, "the body should be a JSON object.")
    fields = _fields(given, _CHAT if chat else _COMPLETION)
    if fields.get("model", model) != model:
        raise RequestError(
            404, f"model is {fields['model']!r:.200}; this server has {model!r}.", param="model", code="model_not_found"
        )
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > _MOST_STOPS or not all(isinstance(one, str) and one for one in stop):
        raise _wrong("stop", stop, f"a string or at most {_MOST_STOPS} strings, none of them empty")
    for one in stop:
        _check_unicode("stop", one)
    seed = fields.get("seed", secrets.randbits(32))
    if not 0 <= seed < 2**32:
        raise _wrong("seed", seed, "in [0, 2^32)")
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    limit = fields[names[0]] if names else most_tokens if chat else min(_COMPLETION_TOKENS, most_tokens)
    if not 0 <= limit <= most_tokens:
        raise _wrong((names or ["max_tokens"])[0], limit, f"in [0, {most_tokens}]")
    prompt = _messages(fields.get("messages")) if chat else _prompt(fields.get("prompt", ""))
    try:
        sampling = SamplingConfig(
            temperature=fields.get("temperature", 1.0), top_k=fields.get("top_k"), top_p=fields.get("top_p"),
            min_p=fields.get("min_p") or None, repetition_penalty=fields.get("repetition_penalty", 1.0),
        )  # fmt: skip
    except ValueError as error:
        raise RequestError(400, str(error), param=str(error).partition(" ")[0]) from None
    include_usage = _include_usage(fields.get("stream_options", {}))
    return Parsed(
        prompt, limit, bool(names), sampling, seed, tuple(stop), fields.get("memory"), fields.get("memory_from"),
        fields.get("stream", False), include_usage,
    )  # fmt: skip


def _fields(given: dict[str, object], known: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """The fields that are not null, each of a right type."""
    fields = {name: value for name, value in given.items() if value is not None}
    for name, value in fields.items():
        if name in _ONLY:
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _ONLY[name]):
                raise RequestError(400, f"{name} is {value!r:.200}; this server does not have it.", param=name)
            continue
        try:
            kinds = lookup("field", name, known)
        except ValueError as error:
            param = name[:100].encode(errors="backslashreplace").decode()  # JSON can escape what is no Unicode
            raise RequestError(400, str(error)[:500], param=param) from None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _wrong(
                name, value, " or ".join(_WORDS[kind] for kind in kinds if kind is not int or float not in kinds)
            )
    return {name: value for name, value in fields.items() if name in known}


def _include_usage(options: dict[str, object]) -> bool:
    """The only field of `stream_options`."""
    for name, value in options.items():
        if name != "include_usage":
            raise _wrong("stream_options", options, "an object with the field include_usage only")
        if value is not None and not isinstance(value, bool):
            raise _wrong("stream_options.include_usage", value, "true or false")
    return options.get("include_usage") is True


def _wrong(name: str, value: object, what: str) -> RequestError:
    return RequestError(400, f"{name} is {value!r:.200}; it should be {what}.", param=name)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(400, f"{name} is not valid Unicode at character {error.start}.", param=name) from None


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        _check_unicode("prompt", prompt)
        return prompt
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        raise _wrong("prompt", prompt, "one text or one list of token ids")
    return prompt


def _messages(messages: list[object] | None) -> list[Message]:
    if not messages:
        raise _wrong("messages", messages, "a list of messages")
    found = []
    for i, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("system", "developer", "user", "assistant"):
            raise _wrong(f"messages[{i}].role", role, "'system', 'developer', 'user' or 'assistant'")
        if isinstance(content, list) and all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise _wrong(f"messages[{i}].content", content, "a text, or a list of parts that are texts")
        _check_unicode(f"messages[{i}].content", content)
        found.append(Message(role, content))
    return found


class Responses:
    """The bodies of the responses to one request.

    Args:
      model: the name of the model.
      chat: whether they are those of /v1/chat/completions.
    """

    def __init__(self, model: str, chat: bool):
        self._chat = chat
        self._about = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model
        }  # fmt: skip

    def whole(self, text: str, reason: str, usage: dict[str, int]) -> dict[str, object]:
        """The response that is not streamed."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return self._body("chat.completion", content, reason) | {"usage": usage}

    def first(self) -> dict[str, object] | None:
        """The first event of a stream, if it has one before the text."""
        return (
            self._body("chat.completion.chunk", {"delta": {"role": "assistant", "content": ""}}) if self._chat else None
        )

    def piece(self, text: str) -> dict[str, object]:
        """An event with new text."""
        return self._body("chat.completion.chunk", {"delta": {"content": text}} if self._chat else {"text": text})

    def last(self, reason: str) -> dict[str, object]:
        """The event after the text."""
        return self._body("chat.completion.chunk", {"delta": {}} if self._chat else {"text": ""}, reason)

    def usage(self, usage: dict[str, int]) -> dict[str, object]:
        """The event with the numbers of tokens."""
        return self.last("stop") | {"choices": [], "usage": usage}

    def _body(self, kind: str, content: Mapping[str, object], reason: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "finish_reason": reason, "logprobs": None, **content}
        return self._about | {"object": kind if self._chat else "text_completion", "choices": [choice]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The numbers of tokens of a request. Those of a memory are not counted: they were read before."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def event(body: dict[str, object] | None) -> bytes:
    """A server-sent event. None: the end."""
    return b"data: " + (b"[DONE]" if body is None else json.dumps(body, ensure_ascii=False).encode()) + b"\n\n"
