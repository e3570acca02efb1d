"""The text of a conversation: the plain form, and templates beside imported weights."""

import json

import pytest

from atlasjax.serve.chat import Message, PlainChat, chat_of

MESSAGES = [
    Message("system", "Be brief."),
    Message("user", "Who?"),
    Message("assistant", "She."),
    Message("user", "Why?"),
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
)


def test_the_plain_form(tmp_path):
    chat = chat_of(tmp_path)
    assert isinstance(chat, PlainChat)
    assert chat.text(MESSAGES) == "System: Be brief.\n\nUser: Who?\n\nAssistant: She.\n\nUser: Why?\n\nAssistant:"
    assert chat.text(MESSAGES[-1:], "text") == "\n\nUser: Why?\n\nAssistant:"


@pytest.mark.parametrize("where", ["file", "config", "named"])
def test_templates(tmp_path, where):
    pytest.importorskip("jinja2", reason="needs the extra 'serve' (jinja2)")
    folder = tmp_path / "peer"
    folder.mkdir()
    config = {"bos_token": {"content": "[B]"}, "eos_token": "[E]"}
    if where == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    config |= {"chat_template": {"file": "not this", "config": TEMPLATE, "named": named}[where]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    chat = chat_of(tmp_path)
    assert chat.text(MESSAGES[1:2]) == "[B]<user>Who?[E]\n<assistant>"
    assert chat.text(MESSAGES[1:2], "text") == "<user>Who?[E]\n<assistant>"
    with pytest.raises(ValueError, match="the chat template refuses the messages: no system"):
        chat.text(MESSAGES)
    assert chat.text(MESSAGES[1:2], "answer") == "[E]\n<user>Who?[E]\n<assistant>"
    assert chat.text(MESSAGES[1:], "answer") == "[E]\n<user>Who?[E]\n<assistant>She.[E]\n<user>Why?[E]\n<assistant>"
    (folder / "chat_template.jinja").write_text(SYSTEM_FIRST)
    chat = chat_of(tmp_path)
    assert chat.text(MESSAGES[:2], "answer") == "[E]<system>Be brief.[E]<user>Who?[E]"
    assert chat.text(MESSAGES[:2], "text") == "<system>Be brief.[E]<user>Who?[E]"
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="the chat template is not one"):
        chat_of(tmp_path)
