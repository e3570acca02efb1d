"""Where the numbers of a run go: metrics.jsonl and TensorBoard."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, TextIO


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl, in order; a last line that a killed run left incomplete is not one.

    Raises:
      ValueError: a line that is not the last is not JSON.
    """
    path = pathlib.Path(path)
    lines = path.read_text().splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}, is not JSON: {line[:80]!r}.") from None
    return records


class MetricsWriter:
    """Appends records to metrics.jsonl, and to TensorBoard event files. A context manager.

    A record is one JSON object: {"step": n, "kind": "train" | "evaluation", name: number, …}. A resumed run first drops
    what was recorded after the checkpoint that it resumes from, so no step appears twice.

    Args:
      run_dir: the run's folder.
      after_step: the step of the checkpoint that the run resumes from; 0 for a new run.
      tensorboard: also write event files.
      active: whether to write at all (one process of several does).
    """

    def __init__(self, run_dir: pathlib.Path, after_step: int = 0, *, tensorboard: bool = True, active: bool = True):
        self.path = run_dir / "metrics.jsonl"
        self._file: TextIO | None = None
        self._events: Any = None
        if not active:
            return
        kept = [record for record in read(self.path) if record["step"] <= after_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(self.path)
        self._file = self.path.open("a")
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=after_step + 1)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Records `values` under optimizer steps done; the line is in the file when this returns."""
        if self._file is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self._file.write(json.dumps({"step": step, "kind": kind, **finite}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(f"{kind}/{name}", value, step)
