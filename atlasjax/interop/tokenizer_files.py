"""The tokenizer beside public weights: which one it is, and its files for `AutoTokenizer` of transformers."""

import json
import pathlib
from collections.abc import Iterable

from atlasjax import storage
from atlasjax.data.config import DataConfig
from atlasjax.data.tokenizers import (
    NAMING,
    BpeTokenizer,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    make_tokenizer,
)
from atlasjax.interop.manifest import PEER
from atlasjax.interop.text_ends import Definition, TextEnds
from atlasjax.storage import AnyPath, hub, write_whole
from atlasjax.train.errors import ConfigError

FILES = ("tokenizer.json", "tokenizer.model", *NAMING, "vocab.json", "merges.txt")
"""Files of a tokenizer that are kept with a run and exported."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def tokenizer_of(source: pathlib.Path, spec: str | None) -> tuple[str, Tokenizer, AnyPath | None]:
    """The tokenizer, its name as `DataConfig.tokenizer`, and the file that defines it, None for bytes.

    Args:
      source: the folder of the weights.
      spec: the name; None: the first of tokenizer.json and tokenizer.model in the folder that can be used.

    Raises:
      ConfigError: there is none, or it cannot be used.
    """
    json_file, model_file = source / "tokenizer.json", source / "tokenizer.model"
    if spec is not None:
        if spec.partition(":")[2].isdecimal():
            raise ConfigError(
                f"tokenizer is {spec!r}, which would be trained; give the one that the weights were trained with."
            )
        specs = [spec]
    else:
        specs = [f"bpe:{json_file}"] * json_file.is_file() + [f"sentencepiece:{model_file}"] * model_file.is_file()
    if not specs:
        raise ConfigError(f"{str(source)!r} has neither tokenizer.json nor tokenizer.model; give --tokenizer.")
    reasons = []
    for one in specs:
        try:
            text = make_tokenizer(DataConfig(tokenizer=one))
        except (ValueError, FileNotFoundError) as error:
            reasons.append(str(error))
            continue
        _, _, path = one.partition(":")
        if path.startswith(hub.SCHEME):
            hub.local(path, beside=NAMING)
        if spec is None and text.fingerprint == BpeTokenizer(_bytes_as_pairs()).fingerprint:
            return "byte", ByteTokenizer(), json_file  # of a run of bytes that was exported
        return one, text, storage.fetched(path) if path else None
    raise ConfigError(f"{reasons[0]} Give another one with --tokenizer.")


def copy(source: AnyPath, target: pathlib.Path, names: Iterable[str]) -> None:
    """Copies the files that are there."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(target / name, (source / name).read_bytes())


def named_templates(folder: AnyPath) -> list[str]:
    """The files of chat templates with names of their own (`serve.templates`), beside the files of `NAMING`."""
    more = folder / "additional_chat_templates"
    names = sorted(file.name for file in more.iterdir() if file.name.endswith(".jinja")) if more.is_dir() else []
    return [f"{more.name}/{name}" for name in names]


def write(folder: pathlib.Path, run: AnyPath, tokenizer: Tokenizer, ends: TextEnds) -> None:
    """Writes the tokenizer of a run for `AutoTokenizer`, which then gives the ids that it gives here, and has its size.

    The files that came with imported weights are copied, if they are of the tokenizer that the run has.

    Args:
      folder: where to.
      run: the run's folder.
      tokenizer: the run's.
      ends: the tokens for the beginning and the end of texts and for padding.
    """
    peer, own = run / PEER, run / "tokenizer"
    if _is_of(peer, tokenizer):
        copy(peer, folder, (*FILES, *named_templates(peer)))
        return
    if isinstance(tokenizer, SentencePieceTokenizer):
        written, kind = folder / "tokenizer.model", "TokenizersBackend"  # it follows the settings of the model
        write_whole(written, (own / SentencePieceTokenizer.FILE).read_bytes())
    else:
        written, kind = folder / "tokenizer.json", "PreTrainedTokenizerFast"
        is_bytes = isinstance(tokenizer, ByteTokenizer)
        definition = json.loads(_bytes_as_pairs()) if is_bytes else storage.read_json(own / BpeTokenizer.FILE)
        if (definition.get("post_processor") or {}).get("type") != "ByteLevel":
            definition["post_processor"] = None  # it may add tokens, which a run's tokenizer does not
        write_whole(written, json.dumps(definition, ensure_ascii=False).encode())
    names = {i: text for text, i in Definition(written).ids().items()}
    described: dict[str, object] = {
        "tokenizer_class": kind,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    for name, token in (("bos_token", ends.begin), ("eos_token", next(iter(ends.ends), None)), ("pad_token", ends.pad)):
        if token in names:
            described[name] = names[token]
    for place in (own, peer):
        template = storage.read_object(place / "tokenizer_config.json").get("chat_template")
        if template is not None:
            described.setdefault("chat_template", template)
        copy(place, folder, (*_TEMPLATES, *named_templates(place)))
    write_whole(folder / "tokenizer_config.json", (json.dumps(described, indent=2) + "\n").encode())


def _is_of(peer: AnyPath, tokenizer: Tokenizer) -> bool:
    """Whether the files of imported weights are of this tokenizer."""
    file = peer / "tokenizer.json"
    model = peer / "tokenizer.model"
    try:
        if file.is_file() and isinstance(tokenizer, BpeTokenizer):
            return BpeTokenizer(file.read_bytes().decode(), str(file)).fingerprint == tokenizer.fingerprint
        if model.is_file() and isinstance(tokenizer, SentencePieceTokenizer):
            return SentencePieceTokenizer(model.read_bytes(), str(model)).fingerprint == tokenizer.fingerprint
    except ValueError:  # one that cannot be used here
        pass
    return False


def _bytes_as_pairs() -> str:
    """The tokenizer of bytes as a `tokenizers` JSON file: a byte-level BPE without merges, whose ids are the bytes."""
    from tokenizers import Tokenizer as Pairs
    from tokenizers import decoders, models, pre_tokenizers

    # Bytes that are printable in Latin-1 stand for themselves, the others for characters from 256 on, in their order (GPT-2).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    made = Pairs(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made.to_str()
