"""The child process that compiles for another machine."""

import re
import subprocess

import jax
import pytest

from atlasjax.plan import child


def test_the_child_runs_nothing_of_the_working_folder_and_takes_any_request(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise SystemExit('a stranger was run')")
    monkeypatch.chdir(tmp_path)
    size = 2**20  # one argument of a command may have 128 KiB
    found = child.run_in_child("tests.plan.echo", {"padding": "x" * size}, timeout=120)
    assert (found.topology, found.devices) == (jax.__version__, size)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("W1201 a warning\nF1201 09:00 check failed: x\nE1201 raising signal 6\n", "F1201 09:00 check failed: x"),
        (
            "Traceback\njax.errors.JaxError: RESOURCE_EXHAUSTED: 3 GiB\nmore\n",
            "jax.errors.JaxError: RESOURCE_EXHAUSTED: 3 GiB",
        ),
        ("ValueError: an inner one\nValueError: no such topology\n", "ValueError: no such topology"),
        ("I1201 a note\nthe last words\n", "the last words"),
        ("", "no message"),
    ],
)
def test_the_reason_of_a_failure_is_found_among_its_messages(monkeypatch, messages, reason):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, -6, "", messages))
    with pytest.raises((ValueError, RuntimeError), match=re.escape(reason.removeprefix("ValueError: "))):
        child.run_in_child("tests.plan.echo", {})
