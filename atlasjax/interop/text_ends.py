"""The tokens that public weights use for the beginning and the end of texts."""

import json
from typing import Any, NamedTuple

from atlasjax.interop.convert import PEER
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

    tokenizer_config.json names them; generation_config.json and config.json have ids.

    Raises:
      ValueError: run_dir is not a folder's name.
    """
    peer = run_folder(run_dir) / PEER
    named, tokens = _json(peer / "tokenizer_config.json"), _json(peer / "tokenizer.json")
    of = {str(token.get("content")): token.get("id") for token in tokens.get("added_tokens", [])}
    of |= {str(token.get("content")): int(i) for i, token in named.get("added_tokens_decoder", {}).items()}
    configs = [_json(peer / name) for name in ("generation_config.json", "config.json")]

    def ids(kind: str) -> tuple[int, ...]:
        name = named.get(f"{kind}_token")
        found = [of.get(str(name.get("content") if isinstance(name, dict) else name))]
        for config in configs:
            given = config.get(f"{kind}_token_id")
            found += given if isinstance(given, list) else [given]
        return tuple(dict.fromkeys(i for i in found if i is not None))

    return TextEnds(next(iter(ids("bos")), None), ids("eos"))


def _json(file: AnyPath) -> dict[str, Any]:
    return json.loads(file.read_bytes()) if file.is_file() else {}
