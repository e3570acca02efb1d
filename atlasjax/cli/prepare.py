"""`atlasjax prepare`."""

import importlib
import shlex
import sys
import time

from atlasjax import storage
from atlasjax.cli.options.prepare import PrepareCommand
from atlasjax.data.config import DataConfig
from atlasjax.data.files import usable_cores
from atlasjax.data.manifest import FILE, Manifest
from atlasjax.data.preparation import prepare
from atlasjax.data.preparation_steps import Report
from atlasjax.train.errors import RunError, user_errors
from atlasjax.train.reports.progress import duration


def run(command: PrepareCommand) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    shown = _Shown()
    with user_errors():
        try:
            there = (storage.expanded(command.out) / FILE).exists()
            manifest = _prepared(command, shown)
        except RuntimeError as error:
            raise RunError(str(error)) from error
        finally:
            shown.end()
    if there:
        print(f"{command.out} was already prepared; nothing was done.")
    _summary(command, manifest)


def _prepared(command: PrepareCommand, shown: "_Shown") -> Manifest:
    if command.runner is not None:
        beam = importlib.import_module("atlasjax.data.beam")  # only here: without Apache Beam it cannot be imported
        return beam.prepare_on_beam(
            command.data, command.out, command.beam, shard_tokens=command.shard_tokens, on_report=shown
        )
    workers = usable_cores() if command.workers is None else command.workers
    return prepare(command.data, command.out, workers=workers, shard_tokens=command.shard_tokens, on_report=shown)


_LINE_EVERY = 10.0  # seconds, where lines are not written over


class _Shown:
    """Shows the progress in a line that is written over on a terminal, and in lines elsewhere."""

    def __init__(self) -> None:
        self._started: dict[str, tuple[float, int]] = {}
        self._open_line = False
        self._printed = 0.0

    def __call__(self, report: Report) -> None:
        now = time.perf_counter()
        started, before = self._started.setdefault(report.stage, (now, report.tokens))
        text = f"{report.stage}: {report.done:,} of {report.total:,} {report.unit} · {report.tokens:,} tokens"
        if now > started:
            text += f" · {(report.tokens - before) / (now - started):,.0f} tokens/s"
        if report.kept:
            text += f" · {report.kept:,} kept"
        if 0 < report.fraction < 1 and now > started:
            text += f" · about {duration((now - started) * (1 - report.fraction) / report.fraction)} left"
        self._open_line = sys.stdout.isatty()
        if not self._open_line and now - self._printed < _LINE_EVERY and report.done < report.total and self._printed:
            return
        self._printed = now
        print(f"\r{text:<100}" if self._open_line else text, end="" if self._open_line else "\n", flush=True)

    def end(self) -> None:
        """Ends the line on a terminal."""
        if self._open_line:
            print(flush=True)


def _summary(command: PrepareCommand, manifest: Manifest) -> None:
    for split, files in manifest.splits.items():
        totals = manifest.totals(split)
        print(
            f"{split}: {totals['documents']:,} documents, {totals['tokens']:,} tokens of {totals['num_bytes']:,} bytes, "
            f"{len(files)} files"
        )
    print(f"tokenizer: {manifest.vocab_size:,} tokens, SHA-256 {manifest.fingerprint}")
    options = f" --data.packing {manifest.packing}" if manifest.packing != DataConfig.packing else ""
    if manifest.separator not in ("", DataConfig.separator):
        options += f" --data.separator {shlex.quote(manifest.separator)}"
    if "validation" not in manifest.splits:
        options += " --data.validation-fraction 0"
    print(
        f"\ntrain: atlasjax train --data.source prepared --data.paths {shlex.quote(command.out)}{options}", flush=True
    )
