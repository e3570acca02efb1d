"""The options of the benchmarks' commands, and which files import each other."""

import graphlib
import json
import os
import pathlib
import runpy
import sys

import pytest

from experiments.benchmarks import gpu_figure, sequence_parallel
from tests.test_imports import ROOT, files_imported

FOLDER = pathlib.Path(sequence_parallel.__file__).parent
# `tpu_static.py` is a command only for its own child processes.
COMMANDS = sorted(
    path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text() and path.stem != "tpu_static"
)


@pytest.fixture
def arguments(monkeypatch):
    """Sets the command line; what a command changes in its process is undone."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return lambda *words: monkeypatch.setattr(sys, "argv", ["command", *map(str, words)])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_options_and_measures_nothing(name, arguments, capsys):
    arguments("--help")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_sequence_parallel_replaces_the_rows_of_out(tmp_path, arguments, monkeypatch):
    monkeypatch.setattr(sequence_parallel, "measure", lambda devices: {"devices": devices})
    before = sequence_parallel.ROWS.read_bytes()
    out = tmp_path / "new" / "rows.jsonl"
    arguments("--out", out)
    for _ in range(2):
        sequence_parallel.main()
    assert [json.loads(line)["devices"] for line in out.read_text().splitlines()] == [1, 4, 16, 64]
    assert sequence_parallel.ROWS.read_bytes() == before


def test_the_gpu_figure_is_written_to_out(tmp_path, arguments, monkeypatch):
    monkeypatch.setattr(gpu_figure, "PATH", tmp_path / "default.png")
    arguments("--out", tmp_path / "new" / "figure.png")
    gpu_figure.main()
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "default.png").exists()


def test_no_circles_of_files():
    """Those inside functions count, for they hide circles."""
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): set(files_imported(path))
        for path in (ROOT / "experiments").rglob("*.py")
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the files
