"""The tokens that public weights use for the beginning and the end of texts, and for padding: found wherever files name them."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from atlasjax import storage
from atlasjax.check import is_integer
from atlasjax.data.tokenizers import BpeTokenizer, SentencePieceTokenizer
from atlasjax.interop.manifest import PEER
from atlasjax.storage import AnyPath
from atlasjax.train.config import run_folder

_KINDS = {"bos": "begin", "eos": "end", "pad": "padding"}
# Names that tokenizers give such tokens by convention, where nothing else says which they are.
_USUAL = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>", "[BOS]"),
    "eos": ("<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|endoftext|>", "[EOS]"),
    "pad": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
}


class TextEnds(NamedTuple):
    """Token ids.

    Attributes:
      begin: stands before the first token of a text; None if there is no such token.
      ends: each of them ends a text; the tokenizer's own comes first.
      pad: fills rows; None if there is no such token.
    """

    begin: int | None = None
    ends: tuple[int, ...] = ()
    pad: int | None = None


class Named(NamedTuple):
    """A token id, and the name of the file that says so."""

    token: int
    where: str


Found = dict[str, list[Named]]
"""The tokens that were found of each kind ("bos", "eos", "pad"), in the order of precedence."""


def text_ends(run_dir: str | AnyPath) -> TextEnds:
    """The tokens of a run of imported weights, or of one that started from it; none for a run that was trained here alone.

    Raises:
      ValueError: run_dir is not a folder's name, or a file is damaged.
    """
    run = run_folder(run_dir)
    peer, own = run / PEER, run / "tokenizer"
    if not peer.is_dir():
        return TextEnds()
    definitions = (own / name for name in (BpeTokenizer.FILE, SentencePieceTokenizer.FILE))
    return chosen(find(peer, next((file for file in definitions if file.is_file()), None)))


def chosen(found: Found) -> TextEnds:
    """The first token of each kind, and all that end a text."""
    first = {kind: next((one.token for one in named), None) for kind, named in found.items()}
    return TextEnds(first["bos"], tuple(dict.fromkeys(one.token for one in found["eos"])), first["pad"])


def described(found: Found) -> str:
    """One line for people."""
    parts = []
    for kind, word in _KINDS.items():
        named = {one.token: one.where for one in reversed(found[kind])}  # the first file that has it wins
        shown = [one.token for one in found[kind]] if kind == "eos" else [one.token for one in found[kind][:1]]
        texts = [f"{token} ({named[token]})" for token in dict.fromkeys(shown)]
        parts.append(f"{word} {', '.join(texts) or 'none'}")
    return f"tokens of texts: {'; '.join(parts)}"


def find(folder: AnyPath, definition: AnyPath | None = None, vocab_size: int | None = None) -> Found:
    """The tokens that files name, in the order of precedence:

    1. names in tokenizer_config.json, then special_tokens_map.json, beside the tokenizer that is used;
    2. the same beside the weights;
    3. ids in generation_config.json, then config.json, each also in its `text_config`;
    4. if none of them says anything about that kind, not even null, the tokenizer's own file: the tokens that the post-processor of
       a tokenizer.json puts around a text, or the ids of a SentencePiece model; then special tokens with a usual name, such as
       "<|endoftext|>".

    A name counts if the tokenizer has a token of that name. All ids that are found end a text; of the other kinds the first counts.

    Args:
      folder: of the weights.
      definition: the file of the tokenizer: tokenizer.json, bpe.json or a SentencePiece model. None: there is none.
      vocab_size: number of the model's tokens, to which the ids must belong. None: not checked.

    Raises:
      ValueError: a file is damaged, or an id of a beginning or an end is none of the model's.
    """
    found: Found = {kind: [] for kind in _KINDS}
    said: set[str] = set()
    tokenizer = Definition(definition)
    places = [] if definition is None or definition.parent == folder else [(definition.parent, tokenizer)]
    places.append((folder, Definition(_own_definition(folder)) if definition is None or places else tokenizer))
    for place, tokens in places:
        for kind, named in _named(place, tokens):
            found[kind].append(named)
    configs = [
        (folder / name, storage.read_object(folder / name)) for name in ("generation_config.json", "config.json")
    ]
    configs += [(file, x["text_config"]) for file, x in configs if isinstance(x.get("text_config"), dict)]
    for file, config in configs:
        for kind in _KINDS:
            given = config.get(f"{kind}_token_id")
            if f"{kind}_token_id" in config:
                said.add(kind)
            for token in given if isinstance(given, list) else [given]:
                if token is not None:
                    found[kind].append(Named(token, str(file)))
    for kind in _KINDS:
        checked = [one for one in found[kind] if kind != "pad" or _is_id(one.token, vocab_size)]  # many write -1
        found[kind] = [Named(_checked(kind, one, vocab_size), one.where) for one in checked]
        if not found[kind] and kind not in said and definition is not None:
            own = tokenizer.own(kind)
            found[kind] = [] if own is None or not _is_id(own, vocab_size) else [Named(own, str(definition))]
    return {kind: [Named(one.token, _short(one.where)) for one in named] for kind, named in found.items()}


def _own_definition(folder: AnyPath) -> AnyPath | None:
    files = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    return next((file for file in files if file.is_file()), None)


def _short(where: str) -> str:
    return "/".join(where.split("/")[-2:])


class Definition:
    """The file of a tokenizer, read as far as it is asked for."""

    def __init__(self, file: AnyPath | None):
        self._file = file

    def ids(self) -> dict[str, object]:
        """Text of a token → its id: added tokens and tokens of the model, or pieces of SentencePiece."""
        if self._pieces is not None:
            return {self._pieces.id_to_piece(i): i for i in range(self._pieces.vocab_size())}
        model = self._json.get("model")
        learned = model.get("vocab") if isinstance(model, dict) else None
        added = dict(_added(self._file, self._json.get("added_tokens")))
        return (learned if isinstance(learned, dict) else {}) | added

    def own(self, kind: str) -> int | None:
        """The id that the file itself has for a kind of token."""
        if self._pieces is not None:
            own = {"bos": self._pieces.bos_id, "eos": self._pieces.eos_id, "pad": self._pieces.pad_id}[kind]()
            return own if own >= 0 else None
        ids = dict(_around(self._json.get("post_processor")))
        if kind in ids:
            return ids[kind]
        special = [x for x in self._json.get("added_tokens") or () if isinstance(x, dict) and x.get("special")]
        of = {token.get("content"): token.get("id") for token in special}
        return next((of[name] for name in _USUAL[kind] if is_integer(of.get(name), 0)), None)

    @functools.cached_property
    def _json(self) -> dict[str, Any]:
        return {} if self._file is None or self._pieces is not None else storage.read_object(self._file)

    @functools.cached_property
    def _pieces(self) -> Any:
        """The processor of a SentencePiece model; None for another file."""
        if self._file is None or self._file.suffix == ".json":
            return None
        import sentencepiece

        found = sentencepiece.SentencePieceProcessor()
        try:
            found.LoadFromSerializedProto(self._file.read_bytes())
        except (RuntimeError, IndexError):
            raise ValueError(f"The tokenizer {str(self._file)!r} is not a SentencePiece model.") from None
        return found


def _named(place: AnyPath, tokenizer: Definition) -> Iterator[tuple[str, Named]]:
    """The tokens that the files beside a tokenizer name."""
    files = [place / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    given = [storage.read_object(file) for file in files]
    names = {
        (kind, file): _text(config.get(f"{kind}_token"))
        for file, config in zip(files, given, strict=True)
        for kind in _KINDS
    }
    of: dict[str, object] = dict(_decoded(files[0], given[0].get("added_tokens_decoder")))
    if any(text is not None and text not in of for text in names.values()):
        of = tokenizer.ids() | storage.read_object(place / "added_tokens.json") | of
    else:
        tokenizer.ids()  # what is damaged is refused when weights are imported, and not when it is needed
    for (kind, file), text in names.items():
        if text in of:
            token: Any = of[text]
            yield kind, Named(token, str(file))


def _text(name: object) -> str | None:
    """The text of a token, which may be written with its properties."""
    content = name.get("content") if isinstance(name, dict) else name
    return content if isinstance(content, str) else None


def _around(processor: object) -> Iterator[tuple[str, int]]:
    """The tokens that a post-processor of a tokenizer.json puts before ("bos") and after ("eos") a text."""
    if not isinstance(processor, Mapping):
        return
    for one in processor.get("processors") or ():
        yield from _around(one)
    for kind, name in (("bos", "cls"), ("eos", "sep")):  # of BERT's and RoBERTa's
        given = processor.get(name)
        if isinstance(given, list) and len(given) == 2 and is_integer(given[1], 0):
            yield kind, given[1]
    kind, known = "bos", processor.get("special_tokens")
    single = processor.get("single")
    for part in single if isinstance(single, list) else ():
        if not isinstance(part, Mapping) or "Sequence" in part:
            kind = "eos"
        elif isinstance(known, Mapping) and isinstance(part.get("SpecialToken"), Mapping):
            token = known.get(part["SpecialToken"].get("id"))
            ids = token.get("ids") if isinstance(token, Mapping) else None
            if isinstance(ids, list) and len(ids) == 1 and is_integer(ids[0], 0):
                yield kind, ids[0]


def _added(file: AnyPath | None, given: object) -> Iterator[tuple[str, object]]:
    """Text and id of the tokens that tokenizer.json lists."""
    if not isinstance(given, list | None) or not all(isinstance(token, dict) for token in given or ()):
        raise ValueError(f"{str(file)!r}: added_tokens is {given!r:.80}; it must be a list of objects.")
    for token in given or ():
        yield str(token.get("content")), token.get("id")


def _decoded(file: AnyPath, given: object) -> Iterator[tuple[str, object]]:
    """Text and id of the tokens that tokenizer_config.json lists by id."""
    if not isinstance(given, dict | None) or not all(
        i.isdecimal() and isinstance(token, dict) for i, token in (given or {}).items()
    ):
        raise ValueError(f"{str(file)!r}: added_tokens_decoder is {given!r:.80}; it must be an object: id → object.")
    for i, token in (given or {}).items():
        yield str(token.get("content")), int(i)


def _is_id(token: object, vocab_size: int | None) -> bool:
    return is_integer(token, 0) and (vocab_size is None or token < vocab_size)


def _checked(kind: str, named: Named, vocab_size: int | None) -> int:
    if _is_id(named.token, vocab_size):
        return named.token
    wanted = "an integer ≥ 0" if vocab_size is None else f"an integer from 0 to {vocab_size - 1}"
    raise ValueError(f"{named.where!r}: the id of the {kind} token is {named.token!r:.80}; it must be {wanted}.")
