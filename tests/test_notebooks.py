"""Every notebook runs from top to bottom, and its two files say the same."""

import pathlib

import pytest

from tests.marks import some_slow

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.py"))
SHORT = "01_watching_a_memory_learn"  # the others, up to minutes each, run with `-m slow`; the library that they use has tests


def test_there_are_notebooks():
    assert {path.stem for path in SOURCES} > {SHORT}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_pair_is_in_step(source):
    script, notebook = jupytext.read(source), jupytext.read(source.with_suffix(".ipynb"))
    content = lambda nb: [(cell.cell_type, cell.source) for cell in nb.cells]
    assert content(script) == content(notebook), f"run: jupytext --sync notebooks/{source.name}"


@pytest.mark.parametrize("source", some_slow(SOURCES, [p for p in SOURCES if p.stem != SHORT]), ids=lambda p: p.stem)
def test_runs(source, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_STEPS", "16")  # of the language model
    notebook = jupytext.read(source)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
