"""The text of a conversation: by the template of the tokenizer's folder, or in a plain form."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from atlasjax import check
from atlasjax.serve.rendering import Renderer, RenderingError
from atlasjax.serve.templates import find_templates
from atlasjax.storage import AnyPath

if TYPE_CHECKING:
    from atlasjax.serve.requests import Tokenizes

_ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
_ANSWER = "\ue000"  # of an answer that a memory holds, in the template's text
_CUT = "\ue000 "  # where a last message ends, which is the beginning of an answer. A template that strips messages shows it
_MARK = "\ufdd0"  # of `guarded` texts
_ESCAPED = "\\ufdd0"  # what becomes of it where a template shows a list as Python writes it
_GIVEN = frozenset({"messages", "add_generation_prompt"})  # what a template has of a conversation anyway


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
      role: "system", "developer", "user" or "assistant".
      content: its text.
      name: who of several with this role says it. Templates decide whether they show it.
    """

    role: str
    content: str
    name: str | None = None

    def __post_init__(self) -> None:
        check.instance("Message", "role", self.role, str)
        check.instance("Message", "content", self.content, str)
        check.instance("Message", "name", self.name, str, optional=True)


class VariableError(ValueError):
    """A variable for a template that it does not read, or that cannot be given to it."""


Before = Literal["nothing", "text", "answer"]
"""The end of a memory, after which messages come."""


class PlainChat:
    """The form for models without a template.

        System: Answer in one word.

        User: Who came home?

        Assistant:

    The answer ends before the next "User:" at the beginning of a paragraph.
    """

    stop: tuple[str, ...] = ("\n\nUser:",)
    reads: frozenset[str] = frozenset()

    def check(self, tokenizer: "Tokenizes") -> None:
        """Nothing: this form has no tokens of its own."""

    def tokens(
        self, tokenizer: "Tokenizes", messages: Sequence[Message], before: Before = "nothing",
        variables: Mapping[str, Any] = {},
    ) -> np.ndarray:  # fmt: skip
        """The tokens of `text`, int32 [time]. None of them is a control token.

        Raises:
          ValueError: there are variables, which this form does not read.
        """
        _check_variables(variables, self.reads)
        return tokenizer.encode(self.text(messages, before))

    def ignored(self, messages: Sequence[Message], variables: Mapping[str, Any] = {}) -> tuple[str, ...]:
        """The fields of messages that are not in the text: names of speakers."""
        return ("messages.name",) if any(message.name is not None for message in messages) else ()

    def text(self, messages: Sequence[Message], before: Before = "nothing") -> str:
        """The prompt for the next answer. before: what comes before it."""
        parts = [f"{_ROLES[message.role]}: {message.content}" for message in messages] + ["Assistant:"]
        return ("" if before == "nothing" else "\n\n") + "\n\n".join(parts)


class TemplateChat:
    """The form of a Jinja template, as `transformers` has them, rendered in a sandbox of another process (`serve.rendering`).

    Args:
      template: its source; or several by name, of which "tool_use" is taken for conversations with tools, "default" for others.
      special: names of special tokens and their texts, such as bos_token.
      added: texts of further special tokens.

    Attributes:
      reads: the names of the variables that it uses beside the messages and special tokens.

    Raises:
      ImportError: jinja2 is not installed.
      ValueError: the source is not a template, or none of several is "default".
    """

    stop: tuple[str, ...] = ()

    def __init__(self, template: str | Mapping[str, str], special: Mapping[str, str], added: Sequence[str] = ()):
        sources = {"default": template} if isinstance(template, str) else template
        if "default" not in sources:
            names = ", ".join(map(repr, sorted(sources)))
            raise ValueError(f"the chat templates are {names}; one of them must be 'default'.")
        self._special, self._added = dict(special), tuple(added)
        self._sources = {name: sources[name] for name in ("default", "tool_use") if name in sources}
        try:
            self._renderers = {name: Renderer(source) for name, source in self._sources.items()}
        except RenderingError as error:
            raise ValueError(f"the chat template is not one ({error}).") from None
        self._uses = frozenset[str]().union(*(one.reads for one in self._renderers.values()))
        self.reads = self._uses - _GIVEN - special.keys()

    def text(
        self, messages: Sequence[Message], before: Before = "nothing", variables: Mapping[str, Any] = {}
    ) -> str:  # fmt: skip
        """The prompt for the next answer.

        Args:
          messages: at least one.
          before: what comes before it. The text's first token is not repeated, and an answer is ended as the template ends it.
          variables: values of JSON, for what the template reads beside the messages, such as tools, documents, enable_thinking.

        Raises:
          ValueError: the template refuses the messages, has an error, does not end in time, or does not read a variable.
        """
        _check_variables(variables, self.reads)
        new = [self._as_dict(message) for message in messages]
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        if before == "answer" and messages[0].role == "user":
            _, found, text = self._rendered(turn + new, True, variables).partition(_ANSWER)
            if found:
                return text
        text = self._rendered(new, True, variables)
        if before == "nothing":
            return text
        # Templates want system messages first.
        end = self._rendered(turn, False, variables).partition(_ANSWER)[2] if before == "answer" else ""
        return end + text.removeprefix(self._special.get("bos_token", ""))

    def tokens(
        self, tokenizer: "Tokenizes", messages: Sequence[Message], before: Before = "nothing",
        variables: Mapping[str, Any] = {},
    ) -> np.ndarray:  # fmt: skip
        """The tokens of `text`, int32 [time].

        The control tokens that the template writes are control tokens. Their names in the content of a message, and in variables,
        are text.

        Raises:
          ValueError: as `text`; or a message has U+FDD0, or a key of a variable the name of a control token.
        """
        given = [{"content": one.content} | ({} if one.name is None else {"name": one.name}) for one in messages]
        guarded = [
            dataclasses.replace(message, **_guarded(tokenizer, fields)) for message, fields in zip(messages, given)
        ]
        return tokenizer.encode_controlled(self.text(guarded, before, _guarded(tokenizer, variables)))

    def ignored(self, messages: Sequence[Message], variables: Mapping[str, Any] = {}) -> tuple[str, ...]:
        """The fields of messages that are not in the text: names, if the template does not show them."""
        if all(message.name is None for message in messages):
            return ()
        nameless = [dataclasses.replace(message, name=None) for message in messages]
        shown = self.text(nameless, variables=variables) != self.text(messages, variables=variables)
        return () if shown else ("messages.name",)

    def check(self, tokenizer: "Tokenizes") -> None:
        """Checks that what the template writes as tokens are tokens.

        Raises:
          ValueError: one of them would be read as the letters of its name.
        """
        source = "\n".join(self._sources.values())
        written = [text for name, text in self._special.items() if name in self._uses]
        written += [text for text in self._added if text in source]
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
        if answer_begins:
            return self._rendered(messages, True)
        *others, last = messages
        marked = [*others, {**last, "content": last["content"] + _CUT}]
        text, cut, after = self._rendered(marked, False).rpartition(_CUT[0])
        if not cut or last["content"].strip() not in text:
            raise ValueError(f"the chat template leaves out the beginning of the answer, {last['content']!r}.")
        return text if after.startswith(_CUT[1:]) else text.rstrip()

    def _rendered(
        self, messages: Sequence[Mapping[str, str]], answer_begins: bool, variables: Mapping[str, Any] = {}
    ) -> str:  # fmt: skip
        given = {"tools": None, "documents": None} | self._special | dict(variables)
        given |= {"messages": list(messages), "add_generation_prompt": answer_begins}
        name = "tool_use" if given["tools"] is not None and "tool_use" in self._renderers else "default"
        try:
            text = self._renderers[name].render(given)
        except RenderingError as error:
            raise ValueError(f"the chat template refuses the messages: {error}.") from None
        if _ESCAPED in text and _ESCAPED in json.dumps(given, ensure_ascii=False):
            raise ValueError(f"a text has {_ESCAPED}, which cannot be told from a mark of the server.")
        return text.replace(_ESCAPED, _MARK)

    def _as_dict(self, message: Message) -> dict[str, str]:
        """A message for the template. What OpenAI's API calls developer is system to templates that know no developer."""
        knows = any("developer" in source for source in self._sources.values())
        role = "system" if message.role == "developer" and not knows else message.role
        given = {"role": role, "content": message.content, "name": message.name}
        return {name: value for name, value in given.items() if value is not None}


def _check_variables(variables: Mapping[str, Any], reads: frozenset[str]) -> None:
    for name in variables:
        if name not in reads:
            known = f"it reads {', '.join(sorted(reads))}" if reads else "there is nothing else that it reads"
            raise VariableError(f"the chat template does not read {name!r:.100}; {known}.")


def _guarded(tokenizer: "Tokenizes", value: Any) -> Any:
    """A value of JSON in which no name of a control token is read as one."""
    if isinstance(value, str):
        return tokenizer.guarded(value)
    if isinstance(value, list):
        return [_guarded(tokenizer, one) for one in value]
    if not isinstance(value, Mapping):
        return value
    for key in value:  # a mark in a key would keep the template from finding it
        if not np.array_equal(tokenizer.encode(key), tokenizer.encode_controlled(key)):
            raise VariableError(f"the key {key!r:.100} has the name of a control token.")
    return {key: _guarded(tokenizer, one) for key, one in value.items()}


Chat = PlainChat | TemplateChat


def chat_of(run_dir: AnyPath) -> Chat:
    """The form of conversations of a run: the template that was imported with its weights, or the plain form.

    Raises:
      ImportError: there is a template, and jinja2 is not installed.
      ValueError: a file is damaged.
    """
    found = find_templates(run_dir)
    return PlainChat() if found is None else TemplateChat(found.sources, found.special, found.added)
