"""The tokens that public weights use for the beginning and the end of texts."""

from typing import NamedTuple

from atlasjax import storage
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
    peer = run_folder(run_dir) / PEER
    named, tokens = storage.read_object(peer / "tokenizer_config.json"), storage.read_object(peer / "tokenizer.json")
    of = {str(token.get("content")): token.get("id") for token in tokens.get("added_tokens", [])}
    of |= {str(token.get("content")): int(i) for i, token in named.get("added_tokens_decoder", {}).items()}
    configs = [storage.read_object(peer / name) for name in ("generation_config.json", "config.json")]
    configs += [config["text_config"] for config in configs if isinstance(config.get("text_config"), dict)]

    def ids(kind: str) -> tuple[int, ...]:
        name = named.get(f"{kind}_token")
        found = [of.get(str(name.get("content") if isinstance(name, dict) else name))]
        for config in configs:
            given = config.get(f"{kind}_token_id")
            found += given if isinstance(given, list) else [given]
        return tuple(dict.fromkeys(i for i in found if i is not None))

    return TextEnds(next(iter(ids("bos")), None), ids("eos"))
