"""An abort, as of jax's coordination service, ends with a message and an exit code of ours."""

import subprocess
import sys

import pytest

CODE = """
import ctypes, os, threading, time
from atlasjax.distributed.processes import aborts_explained

def message():
    if {fails}:
        raise OSError("no disk")
    return "another process has ended."

with aborts_explained(message, 75):
    if {thread}:
        threading.Thread(target=ctypes.CDLL(None).abort).start()
        time.sleep(30)
    elif {abort}:
        os.abort()
print("after", flush=True)
os.abort()
"""


def run(**changes):
    code = CODE.format(**{"fails": False, "thread": False, "abort": True, **changes})
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("thread", [False, True])
def test_an_abort_is_explained(thread):
    found = run(thread=thread)
    assert found.returncode == 75
    assert found.stderr.splitlines()[-1] == "atlasjax: another process has ended."
    assert found.stdout == ""


def test_it_ends_with_the_code_whatever_happens():
    assert run(fails=True).returncode == 75


def test_afterwards_an_abort_is_an_abort():
    found = run(abort=False)
    assert (found.stdout, found.returncode) == ("after\n", -6)
