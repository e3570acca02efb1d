"""Writes the numbers of a run to metrics.jsonl, and gives them to trackers."""

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from atlasjax import json_text, storage
from atlasjax.train.trackers import Trackers

_RESUMED = "resumed"


def read(path: str | storage.AnyPath) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl in order, without those of steps that a resumed run has repeated.

    In a bucket, and in a copy of it, metrics.jsonl is a folder of parts.

    A line that is not a record is skipped with a warning, or without one if a killed run left the line incomplete.
    """
    content = storage.read_log(storage.path(path))
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    records: list[dict[str, Any]] = []
    unreadable: list[int] = []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            unreadable += [number] * bool(line)
        elif record["kind"] == _RESUMED:
            unreadable = [bad for bad in unreadable if bad != number - 1]
            # A run that begins again evaluates the model before its first step again.
            records = [before for before in records if before["step"] <= record["step"]] if record["step"] else []
        else:
            records.append(record)
    unreadable = [bad for bad in unreadable if bad != len(lines)]
    if unreadable:
        warnings.warn(
            f"{path}: {len(unreadable)} lines are not records; the first is line {unreadable[0]}.", stacklevel=2
        )
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json_text.parse(line, "the line")
    except ValueError:
        return None
    whole = isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("kind"), str)
    return record if whole else None


class MetricsWriter:
    """Appends records to metrics.jsonl, and gives them to trackers. A context manager.

    A record is one JSON object: {"step": n, "kind": "train" | "timing" | "evaluation" | …, name: number, …}. The kind of the
    held-out text is "evaluation", that of a named text "evaluation/<name>", and those of the moving average begin with
    "evaluation_ema". The file only grows: a resumed run appends {"step": n, "kind": "resumed"}, and earlier records of later steps
    no longer count (`read`).

    Args:
      run_dir: the run's folder.
      after_step: the step of the checkpoint that the run resumes from, 0 for a new run.
      trackers: what takes the records too. Closed with the file.
      active: whether to write at all. Only one of several processes does.
    """

    def __init__(
        self, run_dir: storage.AnyPath, after_step: int = 0, *, trackers: Trackers | None = None, active: bool = True
    ):
        self.path = run_dir / "metrics.jsonl"
        self._log: storage.Log | None = None
        self._trackers = trackers
        if not active:
            return
        self._log = storage.open_log(self.path)
        if not self._log.empty:
            self._log.append(json.dumps({"step": after_step, "kind": _RESUMED}).encode())

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._log is not None:
                self._log.close()
        finally:
            if self._trackers is not None:
                self._trackers.close()

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Records `values` for a number of optimizer steps done. On a disk the line is in the file when this returns."""
        if self._log is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self._log.append(json.dumps({"step": step, "kind": kind, **finite}).encode())
        if self._trackers is not None:
            self._trackers.log(step, kind, values)

    def commit(self) -> None:
        """Makes what was recorded visible to others. Before a checkpoint, so that none of its steps is missing after it."""
        if self._log is not None:
            self._log.commit()
        if self._trackers is not None:
            self._trackers.commit()
