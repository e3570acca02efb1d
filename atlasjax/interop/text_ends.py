"""The tokens that public weights use for the beginning and the end of texts."""

from collections.abc import Iterator
from typing import NamedTuple

from atlasjax import storage
from atlasjax.check import is_integer
from atlasjax.interop.manifest import PEER
from atlasjax.storage import AnyPath
from atlasjax.train.config import run_folder


class TextEnds(NamedTuple):
    """Token ids.

    Attributes:
      begin: stands before the first token of a text; None if there is no such token.
      ends: each of them ends a text; the tokenizer's own comes first.
    """

    begin: int | None
    ends: tuple[int, ...]


def text_ends(run_dir: str | AnyPath) -> TextEnds:
    """The tokens of an imported run, from the files that came with its weights; none for a run that was not imported.

    tokenizer_config.json names them; generation_config.json and config.json have ids, the latter also in its `text_config`.

    Raises:
      ValueError: run_dir is not a folder's name, or a file is damaged.
    """
    return text_ends_in(run_folder(run_dir) / PEER)


def text_ends_in(folder: AnyPath, vocab_size: int | None = None) -> TextEnds:
    """Like `text_ends`, for the folder with the files.

    Args:
      folder: the folder.
      vocab_size: number of the model's tokens, to which the ids must belong. None: not checked.

    Raises:
      ValueError: a file is damaged, or an id is none of the model's.
    """
    named, tokens = folder / "tokenizer_config.json", folder / "tokenizer.json"
    names = storage.read_object(named)
    of = {text: (tokens, i) for text, i in _added(tokens, storage.read_object(tokens).get("added_tokens"))}
    of |= {text: (named, i) for text, i in _decoded(named, names.get("added_tokens_decoder"))}
    configs = [
        (folder / name, storage.read_object(folder / name)) for name in ("generation_config.json", "config.json")
    ]
    configs += [(file, x["text_config"]) for file, x in configs if isinstance(x.get("text_config"), dict)]

    def ids(kind: str) -> tuple[int, ...]:
        name = names.get(f"{kind}_token")
        text = str(name.get("content") if isinstance(name, dict) else name)
        found = [of[text]] if text in of else []
        for file, config in configs:
            given = config.get(f"{kind}_token_id")
            found += [(file, i) for i in (given if isinstance(given, list) else [given])]
        return tuple(dict.fromkeys(_checked(file, kind, i, vocab_size) for file, i in found if i is not None))

    return TextEnds(next(iter(ids("bos")), None), ids("eos"))


def _added(file: AnyPath, given: object) -> Iterator[tuple[str, object]]:
    """Text and id of the tokens that tokenizer.json lists."""
    if not isinstance(given, list | None) or not all(isinstance(token, dict) for token in given or ()):
        raise ValueError(f"{str(file)!r}: added_tokens is {given!r:.80}; it should be a list of objects.")
    for token in given or ():
        yield str(token.get("content")), token.get("id")


def _decoded(file: AnyPath, given: object) -> Iterator[tuple[str, object]]:
    """Text and id of the tokens that tokenizer_config.json lists by id."""
    if not isinstance(given, dict | None) or not all(
        i.isdecimal() and isinstance(token, dict) for i, token in (given or {}).items()
    ):
        raise ValueError(f"{str(file)!r}: added_tokens_decoder is {given!r:.80}; it should be an object: id → object.")
    for i, token in (given or {}).items():
        yield str(token.get("content")), int(i)


def _checked(file: AnyPath, kind: str, token: object, vocab_size: int | None) -> int:
    if is_integer(token, 0) and (vocab_size is None or token < vocab_size):
        return token
    wanted = "an integer ≥ 0" if vocab_size is None else f"an integer from 0 to {vocab_size - 1}"
    raise ValueError(f"{str(file)!r}: the id of the {kind} token is {token!r:.80}; it should be {wanted}.")
