"""The child process that compiles for another machine."""

import jax

from atlasjax.plan import child


def test_the_child_runs_nothing_of_the_working_folder_and_takes_any_request(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise SystemExit('a stranger was run')")
    monkeypatch.chdir(tmp_path)
    size = 2**20  # one argument of a command may have 128 KiB
    found = child.run_in_child("tests.plan.echo", {"padding": "x" * size}, timeout=120)
    assert (found.topology, found.devices) == (jax.__version__, size)
