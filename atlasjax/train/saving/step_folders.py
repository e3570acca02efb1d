"""The step folders that Orbax sees: only those whose metadata it can interpret, because it reads all and fails if one fails."""

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atlasjax import storage

if TYPE_CHECKING:
    from orbax.checkpoint import path


class StepFolders:
    """Orbax's standard `NameFormat`, without the folders whose `_CHECKPOINT_METADATA` cannot be interpreted.

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
