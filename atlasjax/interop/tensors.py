"""Folders of safetensors: one file, or several with an index. They are mapped, so that a tensor is read when it is asked for."""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from atlasjax.interop.files import check_file, read_json
from atlasjax.storage import tensors as files
from atlasjax.train.errors import ConfigError

if TYPE_CHECKING:
    from safetensors import safe_open

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {name: files.DTYPES[name] for name in ("F32", "F16", "BF16")}
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The description of a tensor: its file, dtype (a name of the format, as "BF16"), shape, and its name in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    stored: str


class Folder(contextlib.AbstractContextManager):
    """The safetensors of a folder, opened for reading. A context manager.

    Args:
      path: the folder.

    Attributes:
      tensors: name → description, in the order of the files and of their content.
      metadata: file → the metadata that it carries.
      notes: lines for people about the folder.

    Raises:
      ConfigError: there are no safetensors, a file is missing or damaged, or the index does not fit the files.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._files: dict[str, safe_open] = {}
        self._opened = contextlib.ExitStack()
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.notes: tuple[str, ...] = ()
        with contextlib.ExitStack() as opening:
            opening.enter_context(self._opened)
            indexed = self._index()
            for name in self._unindexed() if indexed is None else sorted(set(indexed.values())):
                self._open(name)
            if indexed is not None:
                self._check_index(indexed)
            opening.pop_all()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A tensor, or the part `rows` (start, end) of its first axis."""
        file, stored = self._files[self.tensors[name].file], self.tensors[name].stored
        return file.get_tensor(stored) if rows is None else file.get_slice(stored)[rows[0] : rows[1]]

    def read_finite(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """Like `read`. Raises ConfigError if a value is NaN or infinite."""
        found = self.read(name, rows)
        # In blocks: the flags of a whole tensor would take half the memory of a bfloat16 one.
        if not all(np.isfinite(block).all() for block in np.array_split(found, 1 + found.size // 2**20)):
            file = str(self.path / self.tensors[name].file)
            raise ConfigError(f"tensor {name!r} of {file!r} has NaN or infinite values; all must be finite.")
        return found

    def rename(self, renamed: Mapping[str, str]) -> None:
        """Gives tensors other names than they have in the files. renamed: name in the file → other name; all, or none."""
        if renamed:
            self.tensors = {renamed[name]: tensor for name, tensor in self.tensors.items()}

    def _index(self) -> dict[str, str] | None:
        file = self.path / INDEX
        check_file(self.path / FILE)
        check_file(file)
        if (self.path / FILE).is_file():
            return None
        if not file.is_file():
            return None
        indexed = read_json(file).get("weight_map")
        if not isinstance(indexed, dict) or not all(
            isinstance(x, str) and pathlib.Path(x).name == x for x in indexed.values()
        ):
            raise ConfigError(
                f"{str(file)!r} is not an index of safetensors: weight_map should have a file's name for each tensor."
            )
        return indexed

    def _unindexed(self) -> list[str]:
        """The files of a folder without an index: one, or a complete set of numbered ones.

        Raises:
          ConfigError: there is neither. The message says what was found.
        """
        if (self.path / FILE).is_file():
            return [FILE]
        there = sorted(x.name for x in self.path.iterdir())
        found = [name for name in there if name.endswith(".safetensors")]
        numbered = [re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})\.safetensors", name) for name in found]
        parts: dict[tuple[str, str], list[int]] = {(match[1], match[3]): [] for match in numbered if match}
        for match in filter(None, numbered):
            parts[match[1], match[3]].append(int(match[2]))
        said = f"{str(self.path)!r} has neither {FILE} nor {INDEX}."
        if len(parts) == 1 and all(numbered):
            (((start, count), numbers),) = parts.items()
            # A name may claim any number of files.
            lacking = [n for n in range(1, min(int(count), 10**5) + 1) if n not in numbers]
            if not lacking:
                self.notes = (f"there is no {INDEX}; the {len(found)} numbered files are all there",)
                return found
            names = [f"{start}{n:05}-of-{count}.safetensors" for n in lacking]
            raise ConfigError(
                f"{said} It has {len(found)} of {int(count)} numbered files; {listed(names)} must be there too."
            )
        if found:
            raise ConfigError(
                f"{said} It has {listed(found)}: rename the one with the weights to {FILE}, or add the index."
            )
        pickles = [name for name in there if name.endswith(PICKLES)]
        hint = f" {pickles[0]!r} is a pickle, which can run code: save it as safetensors." if pickles else ""
        raise ConfigError(f"{said}{hint}")

    def _open(self, name: str) -> None:
        import safetensors

        file = self.path / name
        check_file(file)
        if not file.is_file():
            raise ConfigError(f"{str(file)!r} is missing; {INDEX} names it.")
        try:
            opened = self._opened.enter_context(safetensors.safe_open(file, framework="np"))
        except safetensors.SafetensorError as error:
            raise ConfigError(f"{str(file)!r} is damaged or not of this format: {error}.") from None
        self._files[name] = opened
        self.metadata[name] = opened.metadata() or {}
        for tensor in opened.offset_keys():  # in the order of the content, which an export keeps
            if tensor in self.tensors:
                raise ConfigError(f"tensor {tensor!r} is in {self.tensors[tensor].file!r} and in {name!r}.")
            described = opened.get_slice(tensor)
            self.tensors[tensor] = Tensor(name, described.get_dtype(), tuple(described.get_shape()), tensor)

    def _check_index(self, indexed: Mapping[str, str]) -> None:
        for name, file in indexed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ConfigError(f"tensor {name!r} is not in {file!r}, where {INDEX} says it is.")
        for name in self.tensors:
            if name not in indexed:
                raise ConfigError(f"tensor {name!r} of {self.tensors[name].file!r} is not in {INDEX}.")


def write(
    path: pathlib.Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    make: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes a safetensors file, one tensor after the other; only one is in memory.

    Args:
      path: the file, which must not exist.
      tensors: name → dtype and shape, in the order of the file.
      make: name → the array, of that dtype and shape.
      metadata: text that the file carries.
    """
    with open(path, "xb") as file:  # in a folder that appears whole
        for part in files.encoded(tensors, make, metadata):
            file.write(part)


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    known = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(map(repr, known[:most])) + more
