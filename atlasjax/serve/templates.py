"""Where a run has the chat template of imported weights, and the special tokens that it writes, as `transformers` finds them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from atlasjax import storage
from atlasjax.storage import AnyPath

_PLACES = ("peer", "tokenizer")  # folders of a run that may have a template
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_END = ".jinja"


@dataclasses.dataclass(frozen=True)
class Templates:
    """The templates and tokens that the files beside a tokenizer name.

    Attributes:
      sources: of the templates, by name.
      special: names of special tokens and their texts, such as bos_token; a template may use them as variables.
      added: texts of further special tokens.
    """

    sources: dict[str, str]
    special: dict[str, str]
    added: tuple[str, ...]


def find_templates(run_dir: AnyPath) -> Templates | None:
    """The templates of a run; None if it has none.

    Files come before tokenizer_config.json, as in `transformers`: chat_template.jinja, and with other names
    additional_chat_templates/NAME.jinja. Last comes chat_template.json, which older processors of text and images have.

    Raises:
      ValueError: a file is damaged.
    """
    for place in _PLACES:
        folder = run_dir / place
        file = folder / "tokenizer_config.json"
        config = storage.read_object(file)
        sources = _files(folder) or _named(file, config) or _named(folder / "chat_template.json")
        if sources:
            return Templates(sources, *_special_tokens(folder, config))
    return None


def _files(folder: AnyPath) -> dict[str, str]:
    files = {"default": folder / _FILE}
    if (folder / _FOLDER).is_dir():
        others = (file for file in (folder / _FOLDER).iterdir() if file.name.endswith(_END))
        files |= {file.name.removesuffix(_END): file for file in others}
    found = {}
    for name, file in files.items():
        if file.is_file():
            try:
                found[name] = file.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{str(file)!r} is not UTF-8 ({error}).") from None
    return found


def _named(file: AnyPath, config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The templates that an object of JSON names: one, a list of {"name", "template"}, or an object by name."""
    given = (storage.read_object(file) if config is None else config).get("chat_template")
    if given is None:
        return {}
    found: Any = {"default": given} if isinstance(given, str) else given
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {str(one.get("name")): one.get("template") for one in found}
    if not isinstance(found, dict) or not all(isinstance(source, str) for source in found.values()):
        raise ValueError(
            f"{str(file)!r}: chat_template is {given!r:.80}; it must be a text, or a list of names and templates."
        )
    return found


def _special_tokens(folder: AnyPath, config: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Texts of the special tokens with names, and of the others."""
    decoder = config.get("added_tokens_decoder")
    # The map is what older versions wrote; transformers reads it only where tokenizer_config.json has no table.
    given = dict(config) | ({} if decoder is not None else storage.read_object(folder / "special_tokens_map.json"))
    extra = given.get("extra_special_tokens")
    extra = given.get("additional_special_tokens") if extra is None else extra
    further = extra if isinstance(extra, dict) else {}
    named = {name: _token(value) for name, value in given.items() if name.endswith("_token")}
    named |= {name: _token(value) for name, value in further.items()}
    listed = decoder.values() if isinstance(decoder, dict) else ()
    added = [_token(one) for one in listed if isinstance(one, dict) and one.get("special")]
    added += [_token(one) for one in extra] if isinstance(extra, list) else []
    special = {name: text for name, text in named.items() if text is not None}
    return special, tuple(dict.fromkeys(text for text in added if text is not None))


def _token(value: Any) -> str | None:
    """The text of a special token, which may be written with its properties."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
