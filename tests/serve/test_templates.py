"""Chat templates with the constructs of public ones are rendered, and found, as `transformers` renders and finds them."""

import json

import pytest

from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.serve.chat import Message, TemplateChat, chat_of
from tests.serve.chat_templates import DOCUMENTS, ROWS, SPECIAL, STRICT, TALK, TOOLS

pytest.importorskip("jinja2", reason="needs the extra 'serve' (jinja2)")
NEEDS = "needs transformers (the extra 'interop')"
WORDS = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ unk_token }}|{{ sep_token }}|{{ messages[0].content }}"


def messages_of(conversation: list[dict[str, str]]) -> list[Message]:
    return [Message(**message) for message in conversation]


@pytest.mark.parametrize("name", ROWS)
def test_constructs_of_public_templates(name):
    row = ROWS[name]
    chat = TemplateChat(row.source, SPECIAL)
    assert chat.text(messages_of(row.messages), variables=row.variables) == row.text
    # The same as the beginning of an answer: up to the last message, and what ends it is left out.
    begun = [dict(message) for message in [*row.messages, {"role": "assistant", "content": "Because i"}]]
    if "{% break %}" not in row.source:
        assert chat.rendered(begun, answer_begins=False).endswith("Because i")


def test_the_beginning_of_an_answer_that_the_end_of_a_turn_repeats():
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chat = TemplateChat(template, {})
    rendered = lambda content: chat.rendered([{"role": "assistant", "content": content}], answer_begins=False)
    assert rendered("i") == "<|im_start|>assistant\ni"
    assert rendered("so ") == "<|im_start|>assistant\nso "
    assert rendered("") == "<|im_start|>assistant\n"
    stripping = TemplateChat(template.replace("m.content", "m.content | trim"), {})
    assert stripping.rendered([{"role": "assistant", "content": " so "}], False) == "<|im_start|>assistant\nso"
    with pytest.raises(ValueError, match="leaves out the beginning of the answer, 'so'"):
        TemplateChat("fine", {}).rendered([{"role": "assistant", "content": "so"}], False)


def test_transformers_renders_the_same():
    render = pytest.importorskip("transformers.utils.chat_template_utils", reason=NEEDS).render_jinja_template
    for name, row in ROWS.items():
        given = {"tools": None, "documents": None} | row.variables | SPECIAL
        (text,), _ = render([row.messages], chat_template=row.source, add_generation_prompt=True, **given)
        assert text == row.text, name
    with pytest.raises(Exception, match="Only user first, got assistant") as theirs:
        render([TALK[1:]], chat_template=STRICT)
    with pytest.raises(ValueError, match=f"refuses the messages: {theirs.value}"):
        TemplateChat(STRICT, {}).text(messages_of(TALK[1:]))


PLACES = {
    "one in the config": {"tokenizer_config.json": {"chat_template": WORDS}},
    "named in the config": {
        "tokenizer_config.json": {
            "chat_template": [{"name": "tool_use", "template": "{{ tools|length }}"}, {"name": "default", "template": WORDS}]
        }
    },
    "a file before the config": {"tokenizer_config.json": {"chat_template": "no"}, "chat_template.jinja": WORDS},
    "a folder of more": {
        "chat_template.jinja": WORDS, "additional_chat_templates/tool_use.jinja": "{{ tools[0].function.name }}"
    },
    "a default in the folder": {"chat_template.jinja": "no", "additional_chat_templates/default.jinja": WORDS},
    "special tokens": {
        "chat_template.jinja": WORDS,
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>", "__type": "AddedToken", "special": True}, "eos_token": "</s>", "image_token": "<i>",
            "unk_token": None,
        },
    },
    "more special tokens": {
        "chat_template.jinja": WORDS,
        "tokenizer_config.json": {"eos_token": "</s>", "extra_special_tokens": {"image_token": "<i>"}},
    },
    "an older map": {
        "chat_template.jinja": WORDS,
        "tokenizer_config.json": {"eos_token": "no"},
        "special_tokens_map.json": {"eos_token": "</s>", "sep_token": {"content": "<sep>", "lstrip": False}},
    },
    "a map beside a table": {
        "chat_template.jinja": WORDS,
        "tokenizer_config.json": {
            "eos_token": "</s>", "added_tokens_decoder": {"5": {"content": "</s>", "special": True}}
        },
        "special_tokens_map.json": {"eos_token": "no"},
    },
}  # fmt: skip
FOUND = {
    "one in the config": ("|||||a", "|||||a"),
    "named in the config": ("|||||a", "1"),
    "a file before the config": ("|||||a", "|||||a"),
    "a folder of more": ("|||||a", "age"),
    "a default in the folder": ("|||||a", "|||||a"),
    "special tokens": ("<s>|</s>|<i>|||a", "<s>|</s>|<i>|||a"),
    "more special tokens": ("|</s>|<i>|||a", "|</s>|<i>|||a"),
    "an older map": ("|</s>|||<sep>|a", "|</s>|||<sep>|a"),
    "a map beside a table": ("|</s>||||a", "|</s>||||a"),
}


def write(folder, files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("name", PLACES)
def test_where_templates_and_their_tokens_are(tmp_path, name):
    write(tmp_path / "peer", PLACES[name])
    chat, plain, tools = chat_of(tmp_path), *FOUND[name]
    assert chat.text([Message("user", "a")]) == plain
    assert (chat.text([Message("user", "a")], variables={"tools": TOOLS}) if "tools" in chat.reads else plain) == tools


def test_transformers_finds_the_same(tmp_path):
    fast = pytest.importorskip("transformers", reason=NEEDS).PreTrainedTokenizerFast
    words = pytest.importorskip("tokenizers").Tokenizer(pytest.importorskip("tokenizers.models").WordLevel({"a": 0}))
    for name, files in PLACES.items():
        write(tmp_path / name, files)
        words.save(str(tmp_path / name / "tokenizer.json"))
        peer = fast.from_pretrained(str(tmp_path / name))
        asked = [peer.apply_chat_template([TALK[0] | {"content": "a"}], tokenize=False, tools=x) for x in (None, TOOLS)]
        assert tuple(asked) == FOUND[name], name


def test_files_that_are_no_templates(tmp_path):
    folder = tmp_path / "peer"
    write(folder, {"chat_template.json": {"chat_template": "{{ messages[0].content }}"}})
    assert chat_of(tmp_path).text([Message("user", "old")]) == "old"
    for content, words in [
        (5, r"tokenizer_config.json': chat_template is 5; it must be a text"),
        ([{"name": "default"}], "chat_template is .*; it must be a text, or a list of names and templates"),
        ([{"name": "rag", "template": ""}], "the chat templates are 'rag'; one of them must be 'default'"),
        ({"rag": "", "tool_use": ""}, "the chat templates are 'rag', 'tool_use'; one of them must be 'default'"),
        ("{% if %}", "the chat template is not one"),
    ]:
        write(folder, {"tokenizer_config.json": {"chat_template": content}})
        with pytest.raises(ValueError, match=words):
            chat_of(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"chat_template.jinja' is not UTF-8"):
        chat_of(tmp_path)


def test_variables_beside_the_messages():
    chat, tokenizer = TemplateChat(ROWS["documents and names"].source, {}), ByteTokenizer()
    assert chat.reads == {"documents"}
    asked = [Message("user", "Hi")]
    assert tokenizer.decode(chat.tokens(tokenizer, asked, variables={"documents": DOCUMENTS})).startswith(
        "Document: 0\nOne"
    )
    with pytest.raises(ValueError, match=r"the chat template does not read 'enable_thinking'; it reads documents\."):
        chat.text(asked, variables={"enable_thinking": False})
    with pytest.raises(ValueError, match="does not read 'messages'"):
        chat.text(asked, variables={"messages": []})
    assert chat.ignored([Message("user", "Hi", "Ann")]) == ()
    assert TemplateChat("{{ messages[0].content }}", {}).ignored([Message("user", "Hi", "Ann")]) == ("messages.name",)


def test_a_developer_is_the_system_for_templates_that_know_none():
    said = [Message("developer", "Be brief.")]
    assert TemplateChat("{{ messages[0].role }}", {}).text(said) == "system"
    template = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert TemplateChat(template, {}).text(said) == "yes"


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("'\\ud83d'", r"its text has U\+D83D, which is no character"),
        ("raise_exception('a\\ud800b')", r"a\\ud800b"),
        ("namespace(_hidden=1)._hidden", "a namespace has the name '_hidden'"),
        ("messages.append(1)", "is not safely callable|access to attribute|unsafe"),
    ],
)
def test_what_is_refused_is_one_line(expression, words):
    with pytest.raises(ValueError, match=f"^the chat template refuses the messages: .*({words})") as caught:
        TemplateChat(f"{{{{ {expression} }}}}", {}).text([Message("user", "a")])
    str(caught.value).encode()  # it can be sent
    assert "\n" not in str(caught.value)
