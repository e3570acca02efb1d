"""Every field of OpenAI's client is served, has no effect and is named in the answer, or is refused by name."""

import json
import typing

import jax
import numpy as np
import pytest

from atlasjax.serve import protocol, slots
from atlasjax.serve.fields import NEUTRAL, SERVED, STREAM_OPTIONS, WITHOUT_EFFECT, RequestError
from atlasjax.serve.messages import BREAKPOINT, MESSAGE, PART, ROLES

types = pytest.importorskip("openai.types", reason="needs OpenAI's client")
USER = {"role": "user", "content": "Hi"}
GOOD = {False: {"prompt": "a"}, True: {"messages": [USER]}}
VALUES = {
    "user": "u", "safety_identifier": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "a"}, "parallel_tool_calls": True,
}  # fmt: skip
MEANT = {
    "n": 2, "best_of": 2, "echo": True, "logprobs": True, "top_logprobs": 5, "presence_penalty": 0.5, "frequency_penalty": -1,
    "logit_bias": {"50256": -100}, "suffix": "b", "response_format": {"type": "json_object"}, "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"}, "moderation": {"model": "omni-moderation-latest"}, "reasoning_effort": "high",
    "verbosity": "low", "web_search_options": {}, "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required", "functions": [{"name": "f"}], "function_call": {"name": "f"},
}  # fmt: skip


def parse(fields: dict, chat: bool = True) -> protocol.Parsed:
    body = json.dumps(GOOD[chat] | fields).encode()
    return protocol.parse(body, chat=chat, model="tiny", most_tokens=100)


def refused(fields: dict, chat: bool = True) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(fields, chat)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("chat", [False, True])
def test_every_field_of_the_client_has_a_class(chat):
    module = types.chat.completion_create_params if chat else types.completion_create_params
    streaming, whole = module.CompletionCreateParamsStreaming, module.CompletionCreateParamsNonStreaming
    names = typing.get_type_hints(streaming).keys() | typing.get_type_hints(whole).keys()
    assert len(names) > 15
    classes = [SERVED[chat].keys(), WITHOUT_EFFECT.keys(), NEUTRAL.keys()]
    assert names <= set().union(*classes)
    assert sum(map(len, classes)) == len(set().union(*classes))
    assert VALUES.keys() == WITHOUT_EFFECT.keys()
    assert MEANT.keys() == NEUTRAL.keys()


def test_every_part_of_a_message_of_the_client_has_a_class():
    """What has none is refused: nothing is left out of a message."""
    chat = types.chat
    hints = lambda kind: typing.get_type_hints(kind)
    kinds = typing.get_args(chat.ChatCompletionMessageParam)
    roles = {role for kind in kinds for role in typing.get_args(hints(kind)["role"])}
    assert roles == {*ROLES, "tool", "function"}
    values = {"refusal": "No.", "audio": {"id": "a"}, "function_call": {"name": "f", "arguments": "{}"}, "tool_call_id": "c",
              "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
    names = set().union(*(hints(kind).keys() for kind in kinds))
    assert names <= {*MESSAGE, *values}
    for name, value in values.items():
        message = {"role": "assistant", "content": "It is.", name: value}
        assert refused({"messages": [USER, message]}).param == f"messages[1].{name}"
        assert parse({"messages": [USER, message | {name: None}]}).ignored == ()
    assert hints(chat.ChatCompletionContentPartTextParam).keys() <= {*PART, BREAKPOINT}
    assert hints(chat.chat_completion_stream_options_param.ChatCompletionStreamOptionsParam).keys() <= {*STREAM_OPTIONS}
    for kind in typing.get_args(chat.chat_completion_content_part_param.ChatCompletionContentPartParam):
        (name,) = typing.get_args(hints(kind)["type"])
        parts = [{"type": name, "text": "a"}]
        if name == "text":
            assert parse({"messages": [USER | {"content": parts}]}).prompt[0].content == "a"
        else:
            assert refused({"messages": [USER | {"content": parts}]}).param == "messages[0].content[0]"
    for role in ("tool", "function", None, 5):
        assert refused({"messages": [{"role": role, "content": "a"}]}).param == "messages[0].role"
    assert [parse({"messages": [{"role": role, "content": "a"}]}).prompt[0].role for role in ROLES] == [*ROLES]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:,"}, "text": "a picture"},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "refusal", "refusal": "No."},
        {"type": "text", "text": "a", "image_url": {"url": "data:,"}},
        {"type": "text"},
        {"type": "text", "text": None},
        "a",
        None,
        ["a"],
    ],
)
def test_a_part_that_is_no_text_is_refused(part):
    error = refused({"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "see"}, part]}]})
    assert error.param.startswith("messages[1].content[1]")
    assert error.param in error.message


def test_texts_of_parts_are_one_text():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", BREAKPOINT: {"mode": "explicit"}}]
    parsed = parse({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": []}]})
    assert [message.content for message in parsed.prompt] == ["a b", ""]
    assert parsed.ignored == (f"messages.content.{BREAKPOINT}",)
    for content in (None, 5, {"text": "a"}):
        assert refused({"messages": [{"role": "user", "content": content}]}).param == "messages[0].content"
    assert refused({"messages": [USER, "a"]}).param == "messages[1]"
    assert refused({"messages": [USER | {"name": 5}]}).param == "messages[0].name"


@pytest.mark.parametrize("chat", [False, True])
def test_what_has_no_effect_is_accepted_and_named(chat):
    assert parse(VALUES, chat).ignored == tuple(name for name in VALUES if name != "parallel_tool_calls")
    assert parse(dict.fromkeys([*VALUES, *MEANT, *SERVED[chat]]) | GOOD[chat], chat).ignored == ()
    for name, asks_nothing in WITHOUT_EFFECT.items():
        assert all(parse({name: value}, chat).ignored == () for value in asks_nothing)


@pytest.mark.parametrize("chat", [False, True])
def test_what_would_change_the_answer_is_refused_by_name(chat):
    for name, value in MEANT.items():
        error = refused({name: value}, chat)
        assert error.param == name
        assert error.message == f"{name} is {value!r}; this server does not have it."
        assert all(parse({name: neutral}, chat).ignored == () for neutral in NEUTRAL[name])
    assert refused({"n": True}, chat).param == "n"
    assert refused({"logprobs": 0}, chat).param == "logprobs"
    assert refused({"brand_new": 1}, chat).param == "brand_new"


def test_tools_that_may_not_be_used():
    tools = {"tools": MEANT["tools"], "functions": MEANT["functions"]}
    assert parse(tools | {"tool_choice": "none", "function_call": "none"}).ignored == ("tools", "functions")
    assert refused({"tools": MEANT["tools"], "tool_choice": "auto"}).param == "tools"
    assert refused({"tools": MEANT["tools"], "function_call": "none"}).param == "tools"


@pytest.mark.parametrize(
    ("options", "usage", "ignored"),
    [
        (None, False, ()),
        ({}, False, ()),
        ({"include_usage": None}, False, ()),
        ({"include_usage": False, "include_obfuscation": False}, False, ()),
        ({"include_usage": True, "include_obfuscation": None}, True, ()),
        ({"include_usage": True, "include_obfuscation": True}, True, ("stream_options.include_obfuscation",)),
    ],
)
def test_options_of_streams(options, usage, ignored):
    for stream in (False, True, None):
        parsed = parse({"stream": stream, "stream_options": options})
        assert (parsed.stream, parsed.include_usage, parsed.ignored) == (bool(stream), usage, ignored)


def test_numbers_at_their_ends():
    for seed in (0, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -1, -(2**63)):
        assert parse({"seed": seed}).seed == seed
    for seed in (2**64, -(2**63) - 1, True, "1"):
        assert refused({"seed": seed}).param == "seed"
    assert parse({"top_p": 0}).sampling.top_p == parse({"top_p": 0.0}).sampling.top_p > 0
    assert parse({"top_p": 1, "min_p": 0, "temperature": 2}).sampling.top_p == 1
    assert refused({"top_p": -0.1}).param == "top_p"
    assert parse({"max_tokens": 7, "max_completion_tokens": 7}).max_tokens == 7
    assert refused({"max_tokens": 7, "max_completion_tokens": 8}).param == "max_tokens"
    assert refused({"max_completion_tokens": 101}).param == "max_completion_tokens"
    assert parse({"stop": []}).stop == parse({"stop": None}).stop == ()


def test_seeds_of_64_bits_have_the_keys_that_jax_gives_them():
    found = {}
    for seed in (0, 5, 2**32 - 1, 2**32, 2**33, 2**63 - 1, -1, -(2**63), -5):
        with jax.enable_x64(True):
            expected = np.asarray(jax.random.key_data(jax.random.key(np.int64(seed))))
        np.testing.assert_array_equal(slots.key_data(seed), expected)
        found[slots.key_data(seed).tobytes()] = seed
    assert len(found) == 9
    np.testing.assert_array_equal(slots.key_data(2**64 - 1), slots.key_data(-1))


def test_what_is_ignored_is_said_once():
    said = protocol.Responses("tiny", True, ["user"], include_usage=True)
    bodies = [said.first(), said.piece("a"), said.last("stop"), said.usage(protocol.usage(1, 2))]
    assert [body.get("ignored") for body in bodies] == [["user"], None, None, None]
    assert [body["usage"] for body in bodies] == [None, None, None, protocol.usage(1, 2)]
    assert protocol.Responses("tiny", False, ["user"]).piece("a")["ignored"] == ["user"]
    whole = protocol.Responses("tiny", True).whole("a", "stop", protocol.usage(1, 2))
    assert "ignored" not in whole


ODD = (
    "1e400", "NaN", "1" + "0" * 400, "-1", "0.5", "true", '""', '"\\ud800"', "[]", "{}", '["a", 3, null]', '{"\\ud800": [1]}',
    "[[[]]]",
    '[{"role": ["user"], "content": "a"}]', '[{"role": "user", "content": "a", "\\ud800": 5}]', '"none"',
    '[{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]', '[{"role": "user", "content": "a", "name": "\\ud800"}]',
    "[" * 90 + "]" * 90, "[" * 5000 + "]" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("chat", [False, True])
def test_odd_values_of_every_field_are_accepted_or_one_line(chat):
    accepted, errors = 0, []
    for name in (*SERVED[chat], *WITHOUT_EFFECT, *NEUTRAL, "unknown", "", "\\ud800"):
        for value in ODD:
            good = json.dumps({key: one for key, one in GOOD[chat].items() if key != name} | {"max_tokens": 1})
            try:
                protocol.parse(f'{good[:-1]}, "{name}": {value}}}'.encode(), chat=chat, model="tiny", most_tokens=100)
                accepted += 1
            except RequestError as error:
                errors.append(error)
    assert accepted > 100
    assert {error.status for error in errors} == {400, 404}
    for error in errors:
        assert error.message.splitlines() == [error.message]
        json.dumps(error.body, ensure_ascii=False).encode()  # it can be sent
