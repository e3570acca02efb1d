"""Requests and responses in the shape of OpenAI's API."""

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlasjax import json_text
from atlasjax.generate import SamplingConfig
from atlasjax.serve.chat import Message
from atlasjax.serve.fields import RequestError, check_unicode, checked, wrong
from atlasjax.serve.messages import messages_of

_MOST_STOPS = 16
_COMPLETION_TOKENS = 16  # the default of this endpoint in OpenAI's API
_SEEDS = (-(2**63), 2**64)
_SMALLEST = float(np.finfo(np.float32).tiny)  # a share that the most likely token alone reaches


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
      variables: what the chat template is given beside the messages.
      ignored: names of fields that were given and have no effect.
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
    variables: Mapping[str, Any]
    ignored: tuple[str, ...]


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
        given = json_text.parse(body, "the body")
    except ValueError as error:
        raise RequestError(400, str(error)) from None
    if not isinstance(given, dict):
        raise RequestError(400, "the body must be a JSON object.")
    fields, ignored = checked(given, chat=chat)
    if fields.get("model", model) != model:
        raise RequestError(
            404, f"model is {fields['model']!r:.200}; this server has {model!r}.", param="model", code="model_not_found"
        )
    seed = fields.get("seed", secrets.randbits(32))
    if not _SEEDS[0] <= seed < _SEEDS[1]:
        raise wrong("seed", seed, "in [-2^63, 2^64)")
    if chat:
        prompt: Any
        prompt, more = messages_of(fields.get("messages"))
        ignored += more
    else:
        prompt = _prompt(fields.get("prompt", ""))
    limit = _limit(fields, most_tokens)
    default = most_tokens if chat else min(_COMPLETION_TOKENS, most_tokens)
    return Parsed(
        prompt, default if limit is None else limit, limit is not None, _sampling(fields), seed, _stop(fields.get("stop", [])),
        fields.get("memory"), fields.get("memory_from"), fields.get("stream", False), fields["stream_options"]["include_usage"],
        fields.get("chat_template_kwargs", {}), tuple(ignored),
    )  # fmt: skip


def _stop(given: str | list[Any]) -> tuple[str, ...]:
    stop = [given] if isinstance(given, str) else given
    if len(stop) > _MOST_STOPS or not all(isinstance(one, str) and one for one in stop):
        raise wrong("stop", stop, f"a string or at most {_MOST_STOPS} strings, none of them empty")
    for one in stop:
        check_unicode("stop", one)
    return tuple(stop)


def _limit(fields: Mapping[str, Any], most: int) -> int | None:
    """Most tokens of the answer, if the request says so. The newer of two names counts for chats."""
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    for name in names:
        if not 0 <= fields[name] <= most:
            raise wrong(name, fields[name], f"in [0, {most}]")
    if len({fields[name] for name in names}) > 1:
        raise wrong(
            "max_tokens", fields["max_tokens"], f"max_completion_tokens, {fields['max_completion_tokens']}, or left out"
        )
    return fields[names[0]] if names else None


def _sampling(fields: Mapping[str, Any]) -> SamplingConfig:
    top_p = fields.get("top_p")
    try:
        return SamplingConfig(
            temperature=fields.get("temperature", 1.0), top_k=fields.get("top_k"),
            top_p=_SMALLEST if top_p == 0 else top_p,  # the most likely token alone
            min_p=fields.get("min_p") or None, repetition_penalty=fields.get("repetition_penalty", 1.0),
        )  # fmt: skip
    except ValueError as error:
        raise RequestError(400, str(error), param=str(error).partition(" ")[0]) from None


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        check_unicode("prompt", prompt)
        return prompt
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        raise wrong("prompt", prompt, "one text or one list of token ids")
    return prompt


class Responses:
    """The bodies of the responses to one request.

    Args:
      model: the name of the model.
      chat: whether they answer /v1/chat/completions.
      ignored: fields of the request without effect. The first body says so.
      include_usage: whether the events of a stream have the numbers of tokens, which are null before the last.
    """

    def __init__(self, model: str, chat: bool, ignored: Sequence[str] = (), include_usage: bool = False):
        self._chat, self._ignored = chat, sorted(ignored)
        self._usage = {"usage": None} if include_usage else {}
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
        # In the first body only: a stream has many.
        once, self._ignored = {"ignored": self._ignored} if self._ignored else {}, []
        return (
            self._about
            | {"object": kind if self._chat else "text_completion", "choices": [choice]}
            | self._usage
            | once
        )


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The numbers of tokens of a request. Tokens of a memory are not counted: they were read before."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def event(body: dict[str, object] | None) -> bytes:
    """A server-sent event. None: the end."""
    return b"data: " + (b"[DONE]" if body is None else json.dumps(body, ensure_ascii=False).encode()) + b"\n\n"
