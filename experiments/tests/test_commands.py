"""The options of the commands, and which files import each other."""

import graphlib
import importlib
import json
import os
import pathlib
import runpy
import sys

import pytest

from experiments.benchmarks import gpu_figure, sequence_parallel
from tests.test_imports import files_imported, modules

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
    """Imports inside functions count, for they hide circles."""
    graph = {module: set(files_imported(tree)) - {module} for module, tree in modules("experiments")}
    assert any(other.startswith("experiments.") for others in graph.values() for other in others)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the files


@pytest.mark.parametrize(
    ("experiment", "options", "words"),
    [
        ("capacity", ["--memories", "linaer"], "Did you mean 'linear'"),
        ("capacity", ["--keys", "narow"], "Did you mean 'narrow'"),
        ("capacity", ["--passes", "0"], "--passes must be at least 1"),
        ("capacity", ["--pairs", "8", "4"], "rising numbers"),
        ("capacity", ["--seeds", "0"], "seeds must be at least 1"),
        ("efficiency", ["--lengths", "0"], "--lengths must be at least 1"),
        ("efficiency", ["--rounds", "0"], "rounds must be at least 1"),
        ("efficiency", ["--size", "tinny"], "Did you mean"),
        ("mad", ["--models", "atlsa"], "Did you mean 'atlas'"),
        ("mad", ["--tasks", "memorisation"], "Did you mean 'memorization'"),
        ("mad", ["--seeds", "0"], "--seeds must be at least 1"),
        ("mad", ["--steps", "0"], "steps must be at least 1"),
        ("mad", ["--models", "delta", "--width", "40"], "do not divide the width 40"),
        ("mqar", ["--models", "titan"], "Did you mean 'titans'"),
        ("mqar", ["--seeds", "0"], "--seeds must be at least 1"),
        ("mqar", ["--models", "delta", "--widths", "40"], "do not divide the width 40"),
        ("mqar", ["--size", "paper", "--batch-size", "30000"], "sizes must be at least batch_size=30000"),
        ("needles", ["--models", "atlsa"], "Did you mean 'atlas'"),
        ("needles", ["--seeds", "0"], "--seeds must be at least 1"),
        ("needles", ["--steps", "0"], "steps must be at least 1"),
        ("needles", ["--lengths", "64"], "length must be at least"),
        ("needles", ["--models", "delta", "--width", "40"], "do not divide the width 40"),
        ("language", ["--only", "titan"], "Did you mean"),
        ("language", ["--seeds", "0"], "--seeds must be at least 1"),
        ("language", ["--rates", "0"], "--rates must be above 0"),
        ("language", ["--bin", "48"], "bin must divide length"),
        ("language", ["--held-out", "0.9"], "held_out must be above 0"),
        ("language", ["--text", "missing.txt"], "missing.txt: no such file"),
        ("language", ["--text", "books.txt"], "'books' names the rows"),
        ("studies", ["--only", "elastic-exp-3x"], "Did you mean"),
        ("studies", ["--seeds", "0"], "--seeds must be at least 1"),
        ("studies", ["--steps", "0"], "steps must be at least 1"),
        ("studies", ["--learning-rate", "-1"], "learning_rate must be above 0"),
        ("studies", ["--text", "missing.txt"], "missing.txt: no such file"),
        ("studies", ["--text", "embedded.txt"], "'embedded' names the rows"),
    ],
)
def test_bad_options_are_refused_before_anything_is_trained(experiment, options, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("books", "embedded"):  # what rows of other texts are called
        (tmp_path / f"{name}.txt").write_text("a text")
    with pytest.raises(SystemExit):
        importlib.import_module(f"experiments.{experiment}.run").main(options)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("experiment", "options", "words"),
    [
        ("mad", ["--tasks", "compression", "memorization"], "1 models × 2 tasks × 18 runs"),
        ("mqar", ["--widths", "16"], "777 million tokens per run"),
        ("needles", [], "1 models × 3 seeds × 2 rates = 6 runs"),
    ],
)
def test_the_plan_of_the_paper_trains_nothing(experiment, options, words, monkeypatch, capsys, tmp_path):
    run = importlib.import_module(f"experiments.{experiment}.run")
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("trained"))
    run.main(["--size", "paper", "--models", "delta", *options, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    for said in (words, "--size paper --go", f"--models delta --out {tmp_path}/host-0"):
        assert said in out
    assert not list(tmp_path.iterdir())
