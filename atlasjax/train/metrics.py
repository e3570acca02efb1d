"""Writes the numbers of a run to metrics.jsonl and TensorBoard."""

import json
import math
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, BinaryIO

_RESUMED = "resumed"


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl in order, without those of steps that a resumed run has repeated.

    A line that is not a record is skipped with a warning, or without one if a killed run left the line incomplete.
    """
    path = pathlib.Path(path)
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() else []
    records: list[dict[str, Any]] = []
    unreadable: list[int] = []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            unreadable += [number] * bool(line)
        elif record["kind"] == _RESUMED:
            unreadable = [bad for bad in unreadable if bad != number - 1]
            records = [before for before in records if before["step"] <= record["step"]]
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
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and type(record.get("step")) is int and isinstance(record.get("kind"), str)
    return record if whole else None


class MetricsWriter:
    """Appends records to metrics.jsonl, and to TensorBoard event files. A context manager.

    A record is one JSON object: {"step": n, "kind": "train" | "timing" | "evaluation", name: number, …}. The file only grows: a
    resumed run appends {"step": n, "kind": "resumed"}, and earlier records of later steps no longer count (`read`).

    Args:
      run_dir: the run's folder.
      after_step: the step of the checkpoint that the run resumes from, 0 for a new run.
      tensorboard: whether to write event files too.
      active: whether to write at all. Only one of several processes does.
    """

    def __init__(self, run_dir: pathlib.Path, after_step: int = 0, *, tensorboard: bool = True, active: bool = True):
        self.path = run_dir / "metrics.jsonl"
        self._file: BinaryIO | None = None
        self._events: Any = None
        if not active:
            return
        self._file = self.path.open("a+b")
        size = self._file.seek(0, os.SEEK_END)
        if size:
            self._file.seek(size - 1)
            self._append(
                b"" if self._file.read(1) == b"\n" else b"\n"
            )  # after a line that a killed run left incomplete
            self._append(json.dumps({"step": after_step, "kind": _RESUMED}).encode() + b"\n")
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
        """Records `values` for a number of optimizer steps done. The line is in the file when this returns."""
        if self._file is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self._append(json.dumps({"step": step, "kind": kind, **finite}).encode() + b"\n")
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(f"{kind}/{name}", value, step)

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line)
        self._file.flush()
