"""Tensors that are not used, such as those of a vision tower or of older saves: kept with a run, and exported unchanged."""

import contextlib
import pathlib
from collections.abc import Iterable, Iterator

from atlasjax.interop import tensors
from atlasjax.interop.family import Family
from atlasjax.storage import AnyPath, temporary_folder, write_whole
from atlasjax.storage.tensors import DTYPES
from atlasjax.train.errors import ConfigError

_KEPT = "kept"  # folder with the tensors, beside what else was imported with the weights


def names(all_names: Iterable[str], family: Family) -> frozenset[str]:
    """The names of tensors that are no part of the language model, or change nothing in it."""
    return frozenset(filter(family.is_extra, all_names))


def described(kept: frozenset[str], family: Family) -> Iterator[str]:
    """Lines for people."""
    others = sorted(name for name in kept if name.startswith(family.kept)) if family.kept else []
    unused = sorted(kept.difference(others))
    if others:
        yield f"{len(others)} tensors that are no part of the language model are kept for the export, and not used"
    if unused:
        yield f"{len(unused)} tensors of an older save that change nothing are kept for the export: {tensors.listed(unused)}"


def save(peer: pathlib.Path, folder: tensors.Folder, kept: frozenset[str]) -> None:
    """Copies the tensors `kept` of a folder of weights.

    Raises:
      ConfigError: a tensor has a dtype that cannot be read.
    """
    kinds = {}
    for name, tensor in folder.tensors.items():
        if name in kept:
            if tensor.dtype not in DTYPES:
                raise ConfigError(f"tensor {name!r} is {tensor.dtype}, must be {', '.join(DTYPES)}.")
            kinds[name] = (tensor.dtype, tensor.shape)
    if kinds:
        (peer / _KEPT).mkdir()
        tensors.write(peer / _KEPT / tensors.FILE, kinds, folder.read, {})


@contextlib.contextmanager
def opened(peer: AnyPath, kept: frozenset[str]) -> Iterator[tensors.Folder | None]:
    """The copies that `save` has made, which must have the tensors `kept`. None if there are none.

    Raises:
      ConfigError: tensors are missing.
    """
    if not kept and not (peer / _KEPT / tensors.FILE).is_file():
        yield None
        return
    with contextlib.ExitStack() as stack:
        if isinstance(peer, pathlib.Path):
            local = peer / _KEPT
            if not local.is_dir():
                raise ConfigError(f"{str(local)!r}, with {len(kept)} tensors of the import, is missing.")
        else:  # files of a store cannot be mapped
            local = stack.enter_context(temporary_folder("kept"))
            write_whole(local / tensors.FILE, (peer / _KEPT / tensors.FILE).read_bytes())
        folder = stack.enter_context(tensors.Folder(local))
        missing = sorted(kept - folder.tensors.keys())
        if missing:
            raise ConfigError(f"{str(peer / _KEPT)!r} lacks the tensors {tensors.listed(missing)} of the import.")
        yield folder
