"""The text of a conversation: by the template of the tokenizer's folder, or in a plain form."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from atlasjax import check, storage
from atlasjax.serve.rendering import Renderer, RenderingError
from atlasjax.storage import AnyPath

if TYPE_CHECKING:
    from atlasjax.serve.requests import Tokenizes

_ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
_ANSWER = "\ue000"  # of an answer that a memory holds, in the template's text
_PLACES = ("peer", "tokenizer")  # folders of a run that may have a template


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
      role: "system", "developer", "user" or "assistant".
      content: its text.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        check.instance("Message", "role", self.role, str)
        check.instance("Message", "content", self.content, str)


Before = Literal["nothing", "text", "answer"]
"""What a memory ends with, after which messages come."""


class PlainChat:
    """The form for models without a template.

        System: Answer in one word.

        User: Who came home?

        Assistant:

    The answer ends before the next "User:" at the beginning of a paragraph.
    """

    stop: tuple[str, ...] = ("\n\nUser:",)

    def check(self, tokenizer: "Tokenizes") -> None:
        """Nothing: this form has no tokens of its own."""

    def tokens(self, tokenizer: "Tokenizes", messages: Sequence[Message], before: Before = "nothing") -> np.ndarray:
        """The tokens of `text`, int32 [time]. None of them is a control token."""
        return tokenizer.encode(self.text(messages, before))

    def text(self, messages: Sequence[Message], before: Before = "nothing") -> str:
        """The prompt for the next answer. before: what comes before it."""
        parts = [f"{_ROLES[message.role]}: {message.content}" for message in messages] + ["Assistant:"]
        return ("" if before == "nothing" else "\n\n") + "\n\n".join(parts)


class TemplateChat:
    """The form of a Jinja template, as `transformers` has them, rendered in a sandbox of another process (`serve.rendering`).

    Args:
      template: its source.
      special: names of special tokens and their texts, such as bos_token.
      added: texts of further special tokens.

    Raises:
      ImportError: jinja2 is not installed.
      ValueError: the source is not a template.
    """

    stop: tuple[str, ...] = ()

    def __init__(self, template: str, special: dict[str, str], added: Sequence[str] = ()):
        self._source, self._special, self._added = template, special, tuple(added)
        try:
            self._renderer = Renderer(template)
        except RenderingError as error:
            raise ValueError(f"the chat template is not one ({error}).") from None

    def text(self, messages: Sequence[Message], before: Before = "nothing") -> str:
        """The prompt for the next answer.

        before: what comes before it. The text's first token is not repeated, and an answer is ended as the template ends it.

        Raises:
          ValueError: the template refuses the messages, has an error, or does not end in time.
        """
        new = [dataclasses.asdict(message) for message in messages]
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        if before == "answer" and messages[0].role == "user":
            _, found, text = self.rendered(turn + new).partition(_ANSWER)
            if found:
                return text
        text = self.rendered(new)
        if before == "nothing":
            return text
        # Templates want system messages first.
        end = self._rendered(turn, False).partition(_ANSWER)[2] if before == "answer" else ""
        return end + text.removeprefix(self._special.get("bos_token", ""))

    def tokens(self, tokenizer: "Tokenizes", messages: Sequence[Message], before: Before = "nothing") -> np.ndarray:
        """The tokens of `text`, int32 [time].

        The control tokens that the template writes are control tokens. Their names in the content of a message are text.

        Raises:
          ValueError: the template refuses the messages, or one has U+FDD0.
        """
        guarded = [Message(message.role, tokenizer.guarded(message.content)) for message in messages]
        return tokenizer.encode_controlled(self.text(guarded, before))

    def check(self, tokenizer: "Tokenizes") -> None:
        """Checks that what the template writes as tokens are tokens.

        Raises:
          ValueError: one of them would be read as the letters of its name.
        """
        written = [text for name, text in self._special.items() if name in self._source]
        written += [text for text in self._added if text in self._source]
        for text in written:
            ids = tokenizer.encode_controlled(text)
            if len(ids) != 1 and tokenizer.decode(ids[-1:]) != text:  # SentencePiece writes a space before the text
                raise ValueError(
                    f"the chat template writes the token {text!r}, which the run's tokenizer does not have."
                )

    def rendered(self, messages: Sequence[Mapping[str, str]], answer_begins: bool = True) -> str:
        """The text of messages {"role": …, "content": …}.

        answer_begins: whether an answer begins after them. If not, the last message is the beginning of an answer: the text ends
        with it.

        Raises:
          ValueError: the template refuses the messages, or leaves out the beginning of the answer.
        """
        text = self._rendered(messages, answer_begins)
        if answer_begins:
            return text
        last = messages[-1]["content"]
        kept = last if last in text else last.strip()  # many templates strip messages
        before, found, _ = text.rpartition(kept)
        if not found:
            raise ValueError(f"the chat template leaves out the beginning of the answer, {last!r}.")
        return before + found

    def _rendered(self, messages: Sequence[Mapping[str, str]], answer_begins: bool) -> str:
        try:
            variables = {"messages": list(messages), "add_generation_prompt": answer_begins}
            return self._renderer.render(variables | self._special)
        except RenderingError as error:
            raise ValueError(f"the chat template refuses the messages: {error}.") from None


Chat = PlainChat | TemplateChat


def chat_of(run_dir: AnyPath) -> Chat:
    """The form of conversations of a run: the template that was imported with its weights, or the plain form.

    Raises:
      ImportError: there is a template, and jinja2 is not installed.
      ValueError: a file is damaged.
    """
    for place in _PLACES:
        config = storage.read_object(run_dir / place / "tokenizer_config.json")
        file = run_dir / place / "chat_template.jinja"
        template = file.read_bytes().decode("utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(template, list):  # several, each with a name
            template = {one["name"]: one["template"] for one in template}.get("default")
        if template is not None:
            special = {name: _token(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
            decoder = config.get("added_tokens_decoder") or {}
            added = [str(token["content"]) for token in decoder.values() if token.get("special")]
            return TemplateChat(template, {name: text for name, text in special.items() if text is not None}, added)
    return PlainChat()


def _token(value: Any) -> str | None:
    """The text of a special token, which may be written with its properties."""
    return value.get("content") if isinstance(value, dict) else value
