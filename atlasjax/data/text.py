"""Reads text files and JSON lines in pieces: plain or compressed, in any encoding."""

import codecs
import difflib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Literal, Protocol

from atlasjax import json_text, storage
from atlasjax.data.documents import TextDocuments
from atlasjax.data.files import COMPRESSIONS, expand
from atlasjax.machine import machine_memory

Errors = Literal["strict", "replace", "skip"]
_HANDLERS = {"strict": "strict", "replace": "replace", "skip": "ignore"}  # of Python's codecs
_READ = 2**20  # bytes read at once
_COMPRESSED = 2**14  # of a compressed file, which may become a thousand times as many
_MARK = "\ufeff"  # a byte-order mark
_SMALL = 64  # bytes; a file this small may be non-empty and still hold no text (a byte-order mark, an empty gzip file)


def is_encoding(name: str) -> bool:
    """Whether Python has a text encoding of this name with an incremental decoder."""
    try:
        found = codecs.lookup(name)
    except LookupError:
        return False
    return found._is_text_encoding and found.incrementaldecoder is not None  # type: ignore[attr-defined]


class _Decompressor(Protocol):
    """One member of a compressed file, as `zlib` and both libraries of Zstandard read it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _decompressor(path: storage.AnyPath) -> Callable[[], _Decompressor] | None:
    """Makes the decompressor of a member of a compressed file; None for any other file.

    Raises:
      ValueError: the file is .zst, and neither Python 3.14 nor `zstandard` is available.
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return None
    if suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        from compression import zstd  # type: ignore[import-not-found]

        return zstd.ZstdDecompressor
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise ValueError(
            f"The data file {str(path)!r} is compressed with Zstandard, which needs Python 3.14 or the package zstandard: "
            "pip install 'atlasjax[zstd]'."
        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj()


def text_pieces(path: storage.AnyPath, encoding: str = "utf-8", errors: Errors = "strict") -> Iterator[str]:
    """Read a file as text, about a megabyte at a time. Line ends are kept.

    A byte-order mark is dropped at the start of the file, of a line and of a member of a compressed file: files that were joined
    (`cat a.txt b.txt`, `cat a.txt.gz b.txt.gz`) have one at the start of each.

    Args:
      path: the file; .gz and .zst are decompressed, with all members that were joined.
      encoding: the name of the encoding.
      errors: how to handle bytes that are invalid in the encoding: raise, replace with U+FFFD, or drop.

    Yields:
      Non-empty strings.

    Raises:
      ValueError: the file has invalid bytes (the message gives the offset of the first), lacks the byte-order mark that its
        encoding needs, is an archive or is compressed in another way than its name says, or cannot be decompressed.
    """
    decoder = codecs.getincrementaldecoder(encoding)(_HANDLERS[errors])
    starts, read = True, 0
    for data, begins in _chunks(path):
        if not read:
            _check_kind(path, data)
        read += len(data)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            offset, bad = read - len(error.object) + error.start, error.object[error.start]
            raise ValueError(
                f"The data file {str(path)!r} is not {encoding.upper()}: byte 0x{bad:02x} at offset {offset} ({error.reason}). "
                "Set its encoding, e.g. --data.encoding latin-1, or use --data.errors replace or skip."
            ) from None
        except UnicodeError as error:  # no byte-order mark, where the encoding needs one
            raise ValueError(
                f"The data file {str(path)!r} is not {encoding.upper()}: {error}. Set its encoding, e.g. --data.encoding utf-16-le."
            ) from None
        starts = starts or begins
        if text:
            ends = text.endswith("\n")
            text = (text.removeprefix(_MARK) if starts else text).replace(f"\n{_MARK}", "\n")
            starts = ends
        if text:
            yield text


# How archives and compressed files begin, at a place. Their bytes are valid in some encodings, such as latin-1.
_KINDS = (
    (0, b"PK\x03\x04", "a zip archive"),
    (257, b"ustar\0", "a tar archive"),
    (257, b"ustar  \0", "a tar archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"\x1f\x8b\x08", "compressed with gzip"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with Zstandard"),
    (0, b"\xfd7zXZ\x00", "compressed with xz"),
    (4, b"1AY&SY", "compressed with bzip2"),
)


def _check_kind(path: storage.AnyPath, data: bytes) -> None:
    for place, magic, kind in _KINDS:
        if data.startswith(magic, place):
            raise ValueError(
                f"The data file {str(path)!r} is {kind}, not text. Unpack it; of compressed files, .gz and .zst are read."
            )


def _chunks(path: storage.AnyPath) -> Iterator[tuple[bytes, bool]]:
    """The decompressed content of a file, each with whether a member begins with it, followed by b""."""
    make = _decompressor(path)
    with path.open("rb") as file:
        if make is None:
            while data := file.read(_READ):
                yield data, False
        else:
            yield from _decompressed(path, file, make)
    yield b"", False


def _decompressed(
    path: storage.AnyPath, file: IO[bytes], make: Callable[[], _Decompressor]
) -> Iterator[tuple[bytes, bool]]:
    # By hand, because the streams of zstandard end without an error where a file was cut off.
    member, begins = make(), True
    rest, begun = b"", False  # what follows a member, and whether anything of this one was read
    try:
        while rest or (rest := file.read(_COMPRESSED)):
            if not begun and path.suffix.lower() == ".gz" and not (rest := rest.lstrip(b"\0")):
                continue  # padding between members
            data, begun = member.decompress(rest), True
            if data:
                yield data, begins
                begins = False
            rest = member.unused_data if member.eof else b""
            if member.eof:
                member, begins, begun = make(), True, False
    except Exception as error:
        if not isinstance(error, EOFError | zlib.error) and type(error).__name__ != "ZstdError":
            raise  # the module of ZstdError depends on the library
        raise ValueError(f"The data file {str(path)!r} cannot be decompressed: {error}.") from None
    if begun:
        raise ValueError(
            f"The data file {str(path)!r} cannot be decompressed: it was cut off before its end-of-stream marker."
        )


def json_documents(
    path: storage.AnyPath, field: str, encoding: str = "utf-8", errors: Errors = "strict"
) -> Iterator[str]:
    """One string field of each line of a file of JSON objects. A null value is an empty document; blank lines are skipped.

    Raises:
      ValueError: a line is not a JSON object, its field is missing or not a string, or as `text_pieces`. The message names the file
        and the line.
    """
    for number, line in enumerate(_lines(text_pieces(path, encoding, errors)), 1):
        if not line.strip():
            continue
        where = f"Line {number} of the data file {str(path)!r}"
        found = json_text.parse(line, where)
        if not isinstance(found, dict):
            raise ValueError(f"{where} is not a JSON object, but a {type(found).__name__}.")
        if field not in found:
            close = difflib.get_close_matches(field, found, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            has = ", ".join(list(found)[:20])
            raise ValueError(f"{where} has no field {field!r} (--data.column).{hint} It has: {has}.")
        text = "" if found[field] is None else found[field]
        if not isinstance(text, str):
            raise ValueError(
                f"{where}: field {field!r} is a {type(text).__name__}; it must be a string (--data.column)."
            )
        yield _whole(text, errors, where)


def _whole(text: str, errors: Errors, where: str) -> str:
    """A text without lone surrogates. JSON can escape half a surrogate pair, which is not a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"{where} has a lone surrogate, {text[error.start]!r}; use --data.errors replace or skip."
            ) from None
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", _HANDLERS[errors])
    return text


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    """Lines without line ends (only "\\n" ends a line of JSON)."""
    begun: list[str] = []
    for piece in pieces:
        first, *rest = piece.split("\n")
        begun.append(first)
        if rest:
            yield "".join(begun)
            yield from rest[:-1]
            begun = [rest[-1]]
    yield "".join(begun)


def text_files(
    paths: Sequence[str], suffixes: Sequence[str], encoding: str = "utf-8", errors: Errors = "strict"
) -> list[storage.AnyPath]:
    """List the files that hold text. Empty files that were found in a folder are left out; what is left out is said once.

    Raises:
      FileNotFoundError: as `expand`.
      ValueError: a named file is empty, all files are empty, or a very small file cannot be read, as `text_pieces`.
    """
    files, found, left_out = expand(paths, suffixes)
    full = []
    for file in files:
        size = file.stat().st_size
        if size > _SMALL or (size and any(text_pieces(file, encoding, errors))):
            full.append(file)
        elif file not in found:
            raise ValueError(f"The data file {str(file)!r} is empty.")
        else:
            left_out.add("empty", file)
    if not full:
        raise ValueError(f"All {len(files)} data files under {', '.join(map(repr, paths))} are empty.")
    left_out.say(paths)
    return full


def text_documents(
    paths: Sequence[str], suffixes: Sequence[str], encoding: str = "utf-8", errors: Errors = "strict"
) -> TextDocuments:
    """Read text files into memory, one document each.

    Raises:
      FileNotFoundError: as `expand`.
      ValueError: as `text_files` and `text_pieces`, or the files do not fit in the machine's memory.
    """
    files = text_files(paths, suffixes, encoding, errors)
    _check_size(files, paths)
    return TextDocuments(["".join(text_pieces(file, encoding, errors)) for file in files])


def jsonl_documents(
    paths: Sequence[str], field: str, encoding: str = "utf-8", errors: Errors = "strict"
) -> TextDocuments:
    """Read files of JSON lines (.jsonl in a folder) into memory, one document per line.

    Raises:
      FileNotFoundError: as `expand`.
      ValueError: as `text_files` and `json_documents`, or the files do not fit in the machine's memory.
    """
    files = text_files(paths, (".jsonl",), encoding, errors)
    _check_size(files, paths)
    return TextDocuments([text for file in files for text in json_documents(file, field, encoding, errors)])


def _check_size(files: Sequence[storage.AnyPath], paths: Sequence[str]) -> None:
    size, memory = sum(file.stat().st_size for file in files), machine_memory()
    if size > memory:
        raise ValueError(
            f"The data files under {', '.join(map(repr, paths))} have {size / 2**30:,.1f} GiB, which are read into memory; the "
            f"machine has {memory / 2**30:,.1f} GiB. Use fewer files, or run `atlasjax prepare` and train with source 'prepared'."
        )
