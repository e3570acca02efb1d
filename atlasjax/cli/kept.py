"""Results of finished requests in a file, so that a command which is stopped goes on after them."""

import contextlib
import hashlib
import json
from typing import Any

from atlasjax import json_text, storage
from atlasjax.storage import AnyPath


class KeptResults:
    """Results by request: a kind and its arguments. Each is in the file (in a store, a minute later) when `add` returns.

    Args:
      file: JSON lines, made by the first `add`. A line that a killed process left incomplete is ignored.

    Attributes:
      file: as given.
      found: how many results were there.

    Raises:
      OSError: it cannot be read or written.
    """

    def __init__(self, file: AnyPath):
        self.file = file
        self._log: storage.Log | None = None
        self._results: dict[str, Any] = {}
        for line in storage.read_log(file).splitlines():
            try:
                key, result = json_text.parse(line, "a line")
                self._results[key] = result
            except (ValueError, TypeError):  # its request is asked again
                continue
        self.found = len(self._results)

    def get(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        """The result of a request, a value of JSON; None if there is none."""
        return self._results.get(_key(kind, arguments))

    def add(self, kind: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Keeps a result, a value of JSON."""
        if self._log is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._log = storage.open_log(self.file)
        key = _key(kind, arguments)
        if key not in self._results:
            self._results[key] = result
            self._log.append(json.dumps([key, result]).encode())

    def close(self) -> None:
        """Ends; the results stay."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def remove(self) -> None:
        """Ends, and removes the results."""
        self.close()
        with contextlib.suppress(FileNotFoundError):  # nothing was kept
            if isinstance(self.file, storage.StorePath):
                self.file.rmtree()  # a folder of parts
            else:
                self.file.unlink()


def _key(kind: str, arguments: tuple[Any, ...]) -> str:
    return hashlib.sha256(json.dumps([kind, arguments], sort_keys=True, default=str).encode()).hexdigest()
