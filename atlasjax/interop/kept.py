"""Tensors that are no part of the language model, such as those of a vision tower: kept with a run, and exported unchanged."""

import contextlib
import pathlib
from collections.abc import Iterable, Iterator

from atlasjax.interop import tensors
from atlasjax.storage import AnyPath, temporary_folder, write_whole
from atlasjax.storage.tensors import DTYPES
from atlasjax.train.errors import ConfigError

_KEPT = "kept"  # folder with the tensors, beside what else was imported with the weights


def names(all_names: Iterable[str], beginnings: tuple[str, ...]) -> frozenset[str]:
    """Those names that start with one of the beginnings."""
    return frozenset(name for name in all_names if name.startswith(beginnings))


def save(peer: pathlib.Path, folder: tensors.Folder, kept: frozenset[str]) -> None:
    """Copies the tensors `kept` of a folder of weights.

    Raises:
      ConfigError: a tensor has a dtype that cannot be read.
    """
    kinds = {}
    for name, tensor in folder.tensors.items():
        if name in kept:
            if tensor.dtype not in DTYPES:
                raise ConfigError(f"tensor {name!r} is {tensor.dtype}, should be {', '.join(DTYPES)}.")
            kinds[name] = (tensor.dtype, tensor.shape)
    if kinds:
        (peer / _KEPT).mkdir()
        tensors.write(peer / _KEPT / tensors.FILE, kinds, folder.read, {})


@contextlib.contextmanager
def opened(peer: AnyPath, kept: frozenset[str]) -> Iterator[tensors.Folder | None]:
    """What `save` has copied, which must have the tensors `kept`. None if there are none.

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
