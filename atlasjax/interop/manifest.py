"""The manifest of the files that a run was imported from: names, dtypes, order and files of their tensors."""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import TypedDict

from atlasjax.interop import table, tensors
from atlasjax.interop.tensors import listed
from atlasjax.storage import AnyPath, read_json, write_whole
from atlasjax.train.errors import ConfigError

PEER = "peer"  # folder in a run's folder: what was imported with the weights
_FILE = "tensors.json"


class File(TypedDict):
    """A file of the peer: the text it carries, and name → dtype of its tensors, in its order."""

    metadata: dict[str, str]
    tensors: dict[str, str]


class Manifest(TypedDict):
    """The name of the family, the files by name, and name of a tensor in the files → its name in the family, where they differ."""

    family: str
    files: dict[str, File]
    renamed: dict[str, str]


def save(peer: pathlib.Path, family: str, folder: tensors.Folder) -> None:
    """Writes the manifest of a folder of weights."""
    files: dict[str, File] = {name: {"metadata": metadata, "tensors": {}} for name, metadata in folder.metadata.items()}
    for tensor in folder.tensors.values():
        files[tensor.file]["tensors"][tensor.stored] = tensor.dtype
    renamed = {tensor.stored: name for name, tensor in folder.tensors.items() if tensor.stored != name}
    manifest: Manifest = {"family": family, "files": files, "renamed": renamed}
    write_whole(peer / _FILE, json.dumps(manifest).encode())


def read(peer: AnyPath, families: Iterable[str]) -> Manifest | None:
    """The manifest that `save` has written; None for a run that was not imported.

    Raises:
      ConfigError: it is damaged.
    """
    file = peer / _FILE
    if not file.is_file():
        return None
    try:
        manifest = read_json(file)
        family, files, renamed = manifest["family"], manifest["files"], manifest.get("renamed", {})
        intact = isinstance(family, str) and isinstance(files, dict) and all(map(_is_file, files, files.values()))
        intact = intact and isinstance(renamed, dict) and all(isinstance(x, str) for x in renamed.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise _damaged(peer, "it is not what the import wrote")
    if family not in families:
        raise _damaged(peer, f"its family is {family!r}; it must be one of {', '.join(families)}")
    return {"family": family, "files": files, "renamed": renamed}


def check_names(
    peer: AnyPath, manifest: Manifest, pieces: Iterable[table.Piece], kept: Mapping[str, tensors.Tensor]
) -> None:
    """Raises ConfigError unless the names belong to the tensors of a model and to the tensors kept beside them.

    Args:
      peer: the folder of the manifest.
      manifest: what `read` gave.
      pieces: of the model's tensors. The manifest must have one name of each; it may lack copies.
      kept: the tensors that are no part of the language model, by name.
    """
    there: dict[str, str] = {}
    for content in manifest["files"].values():
        for stored, dtype in content["tensors"].items():
            name = manifest["renamed"].get(stored, stored)
            if name in there:
                raise _damaged(peer, f"it has tensor {name!r} twice")
            there[name] = dtype
    known: set[str] = set()
    for piece in pieces:
        found = [name for name in piece.names if name in there]
        if len(found) != 1 and not (piece.copy and not found):
            raise _damaged(peer, f"it has {len(found)} of the names {listed(piece.names)}; it should have one")
        known.update(found)
    for name, dtype in there.items():
        if name in known:
            wanted = list(tensors.DTYPES)
        elif name in kept:
            wanted = [kept[name].dtype]
        else:
            raise _damaged(peer, f"tensor {name!r} is none of the model's")
        if dtype not in wanted:
            raise _damaged(peer, f"the dtype of {name!r} is {dtype!r}; it must be {' or '.join(wanted)}")
    if kept.keys() - there.keys():
        raise _damaged(peer, f"it lacks tensor {min(kept.keys() - there.keys())!r}")


def _is_file(name: str, content: object) -> bool:
    """Whether this is an entry of the manifest: the name has no folder, and all else is text."""
    return (  # a name with a folder could write outside the folder of the export
        pathlib.PurePath(name).name == name
        and isinstance(content, dict)
        and content.keys() == {"metadata", "tensors"}
        and all(isinstance(x, dict) and all(isinstance(y, str) for y in x.values()) for x in content.values())
    )


def _damaged(peer: AnyPath, why: str) -> ConfigError:
    return ConfigError(f"{str(peer / _FILE)!r} is damaged: {why}.")
