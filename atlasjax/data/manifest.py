"""The description of a prepared data set. It is written last, so a folder with a manifest is complete."""

import dataclasses
import json

import numpy as np

from atlasjax import check
from atlasjax.data.config import Packing, Split
from atlasjax.data.token_files import TokenFile
from atlasjax.storage import AnyPath, read_json, write_whole

FILE = "manifest.json"
SHARD_TOKENS = 2**26  # about as many tokens come into one file
_FORMAT = 2
_FORMATS = (1, 2)  # 1 has no checksums of the ends of documents
_DTYPES = ("uint8", "uint16", "uint32")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a prepared data set.

    Attributes:
      fingerprint: `fingerprint` of the tokenizer, which is saved beside the manifest in `tokenizer/`.
      vocab_size: vocabulary size of the tokenizer.
      dtype: dtype of the token ids in the files.
      packing: the packing that documents were tokenized for. For `contiguous`, every document ends with the separator.
      separator: this separator, or "" for `documents`.
      splits: for each split, its token files in order.
      source: fields of the `DataConfig` that it was prepared with, and the target number of tokens per file.
      versions: versions of the packages that made it.
      inputs: digest of the names and sizes of what was read (`Inputs.digest`). None if an older version made it.
    """

    fingerprint: str
    vocab_size: int
    dtype: str
    packing: Packing
    separator: str
    splits: dict[Split, tuple[TokenFile, ...]]
    source: dict[str, object]
    versions: dict[str, str]
    inputs: str | None = None

    @property
    def token_dtype(self) -> np.dtype:
        """The dtype of the ids."""
        return np.dtype(self.dtype)

    def totals(self, split: Split) -> dict[str, int]:
        """The number of documents, tokens and bytes of text in a split."""
        names = ("documents", "tokens", "num_bytes")
        return {name: sum(getattr(file, name) for file in self.splits[split]) for name in names}


def write_manifest(folder: AnyPath, manifest: Manifest) -> None:
    """Write the manifest of a folder whose other files are complete."""
    saved = {
        "format": _FORMAT,
        **{field.name: getattr(manifest, field.name) for field in dataclasses.fields(Manifest)},
        "totals": {split: manifest.totals(split) for split in manifest.splits},
        "splits": {split: [dataclasses.asdict(file) for file in files] for split, files in manifest.splits.items()},
    }
    write_whole(folder / FILE, (json.dumps(saved, indent=1) + "\n").encode())


def read_manifest(folder: AnyPath) -> Manifest:
    """Read the manifest of a prepared data set.

    Raises:
      FileNotFoundError: there is no manifest.
      ValueError: it is damaged or has another format version.
    """
    path = folder / FILE
    damaged = ValueError(f"The manifest {str(path)!r} is damaged.")
    try:
        saved = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{str(folder)!r} is not prepared data: {FILE} is missing. `atlasjax prepare` writes it last. To resume an interrupted "
            "preparation, run the same command again."
        ) from None
    except ValueError:
        raise damaged from None
    try:
        if saved["format"] not in _FORMATS:
            raise ValueError(
                f"The prepared data {str(folder)!r} has format {saved['format']}; this atlasjax reads format {_FORMAT}."
            )
        fields = {field.name: saved[field.name] for field in dataclasses.fields(Manifest) if field.name != "inputs"}
        fields["inputs"] = saved.get("inputs")
        fields["splits"] = {
            split: tuple(_checked(TokenFile(**file)) for file in files) for split, files in saved["splits"].items()
        }
    except (KeyError, TypeError, AttributeError):
        raise damaged from None
    if fields["dtype"] not in _DTYPES:  # NumPy knows dtypes whose values are addresses
        raise damaged
    return Manifest(**fields)


def _checked(file: TokenFile) -> TokenFile:
    """Raises TypeError if a description has another form than `TokenWriter` gives it: its name is a file's in the folder."""
    *numbers, ends, sizes = dataclasses.astuple(file)[1:]
    numbers += [number for number in (ends, sizes) if number is not None]
    is_name = isinstance(file.name, str) and file.name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(file.name)
    if not is_name or not all(check.is_integer(number, 0) for number in numbers):
        raise TypeError(f"this is no token file: {file}")
    return file
