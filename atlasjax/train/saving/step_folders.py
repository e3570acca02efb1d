"""The folders of steps: which are complete, which Orbax can read, what a failed save leaves, and the room for another one."""

import contextlib
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
from jaxtyping import PyTree

from atlasjax import storage

if TYPE_CHECKING:
    from orbax.checkpoint import path

_COMMITTED = "commit_success.txt"  # Orbax's marker in a bucket


class StepFolders:
    """Orbax's standard `NameFormat`, without the folders whose `_CHECKPOINT_METADATA` cannot be interpreted.

    Orbax reads the metadata of all folders that it sees, and fails if one of them fails.

    Attributes:
      unreadable: step → the reason why its metadata cannot be interpreted. Updated whenever Orbax lists the folders.
    """

    def __init__(self) -> None:
        from orbax.checkpoint import path

        self._standard = path.step.standard_name_format()
        self.unreadable: dict[int, str] = {}

    def build_name(self, step: int) -> str:
        """The name of a step's folder."""
        return self._standard.build_name(step)

    def find_step(self, base_path: str | pathlib.Path, step: int) -> "path.step.Metadata":
        """Orbax's description of a step's folder."""
        return self._standard.find_step(base_path, step)

    def find_all(self, base_path: str | pathlib.Path) -> "Iterator[path.step.Metadata]":
        """Orbax's descriptions of the folders that it can read, in any order."""
        self.unreadable = {}
        for folder in self._standard.find_all(base_path):
            try:
                _ = folder.commit_timestamp  # reads and interprets the metadata
            except Exception as error:  # whatever is raised by values of other types
                if storage.is_outage(error):
                    raise
                lines = str(error).splitlines() or [type(error).__name__]
                self.unreadable[folder.step] = f"its metadata cannot be interpreted: {lines[0][:200]}".rstrip(". ")
            else:
                yield folder


def complete_steps(directory: storage.AnyPath) -> list[int]:
    """The steps in a folder of checkpoints whose saves are complete, oldest first, damaged ones included. Reads no metadata."""
    marker = _COMMITTED if isinstance(directory, storage.StorePath) else ""
    found = (folder for folder in directory.glob("[0-9]*") if folder.name.isdecimal() and (folder / marker).exists())
    return sorted(int(folder.name) for folder in found)


def check_path(run_dir: storage.AnyPath) -> None:
    r"""Checks that Orbax can read what it saves in a folder of this machine.

    It merges what the processes have written with `glob`, to which [x] is a pattern, and TensorStore reads a backslash as a slash.

    Raises:
      ValueError: the absolute path has [x] or a backslash.
    """
    found = re.search(r"\\|\[[^/]*\]", str(run_dir.absolute()))
    if found and not isinstance(run_dir, storage.StorePath):
        raise ValueError(
            f"run_dir is {str(run_dir)!r}, whose absolute path has {found[0]!r}; it should have no brackets and no backslashes, "
            "because no checkpoint could be read from there."
        )


def missing_space(directory: storage.AnyPath, arrays: PyTree) -> str | None:
    """Why this process's part of the arrays has no room on its disk, None if it has."""
    if isinstance(directory, storage.StorePath):
        return None  # a bucket has no size limit
    needed = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(arrays)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0  # each part is written once, by the first device that has it
    )
    free = shutil.disk_usage(directory).free
    if free >= needed:
        return None
    return f"the disk has {free / 2**20:.1f} MiB free; the checkpoint needs {needed / 2**20:.1f} MiB"


def unmerged(folder: storage.AnyPath) -> str | None:
    """Why a step that Orbax has saved could never be read, None if it can; such a step is removed.

    Orbax merges what the processes have written, and says nothing if it finds none of it.
    """
    with contextlib.suppress(OSError):  # of a store; then nothing is known
        if not (folder / "params" / "manifest.ocdbt").exists():
            folder.rmtree() if isinstance(folder, storage.StorePath) else shutil.rmtree(folder, ignore_errors=True)
            return "params/manifest.ocdbt is missing, without which its arrays cannot be read"
    return None


def remove_incomplete(directory: storage.AnyPath, step: int) -> None:
    """Removes what a failed save of a step has written."""
    if isinstance(directory, storage.StorePath):
        left = directory / str(step)
        with contextlib.suppress(OSError):  # the store itself may have failed; the next job cleans up
            if step not in complete_steps(directory) and left.is_dir():
                left.rmtree()
    else:
        for leftover in directory.glob(f"{step}.*tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)
