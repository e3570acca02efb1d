"""Files and folders appear whole or not at all; what killed writers leave is removed, and what living ones write is not."""

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from atlasjax import storage
from atlasjax.storage import locks, writing

LEFT = f".a.{'0' * 16}.partial"
WRITER = """
import pathlib, sys, time
from atlasjax import storage
kind, path = sys.argv[1], pathlib.Path(sys.argv[2])
with getattr(storage, kind)(path) as new:
    if kind == "replacing":
        new.write(b"x" * 100)
        new.flush()
    else:
        (new / "weights").write_bytes(b"x")
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def sweep_each_time(monkeypatch):
    monkeypatch.setattr(writing, "_REST", 0)


def partials(folder):
    return sorted(path.name for path in folder.glob(".*.partial"))


def test_a_link_is_replaced_and_permissions_are_as_asked(tmp_path):
    (tmp_path / "precious").write_text("of another")
    (tmp_path / "a").symlink_to("precious")
    storage.write_whole(tmp_path / "a", b"new", mode=0o600)
    assert (tmp_path / "precious").read_text() == "of another"
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert partials(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        storage.write_whole(tmp_path / "none" / "a", b"")


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_bytes(b"before")
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'"), storage.replacing(tmp_path / "a"):
        raise full
    assert (tmp_path / "a").read_bytes() == b"before"
    assert partials(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / LEFT).write_bytes(b"half")
    others = [".a.partial", f"a.{'0' * 16}.partial", f".a.{'x' * 16}.partial", ".a.swp"]
    for name in others:
        (tmp_path / name).write_bytes(b"of another program")
    os.mkfifo(tmp_path / f".b.{'0' * 16}.partial")
    (tmp_path / f".c.{'0' * 16}.partial").symlink_to("nowhere")
    storage.write_whole(tmp_path / "z", b"")
    assert not (tmp_path / LEFT).exists()
    assert all((tmp_path / name).exists() for name in others)
    assert os.path.lexists(tmp_path / f".c.{'0' * 16}.partial")


@pytest.mark.parametrize("kind", ["replacing", "new_folder"])
def test_what_a_living_process_writes_stays_until_it_is_killed(tmp_path, kind):
    """However old it looks."""
    look = {"replacing": lambda: storage.write_whole(tmp_path / "z", b"")}.get(
        kind, lambda: storage.sweep(tmp_path, folders=True)
    )
    with subprocess.Popen([sys.executable, "-c", WRITER, kind, tmp_path / "a"], stdout=subprocess.PIPE) as running:
        try:
            assert running.stdout.readline() == b"writing\n"
            (partial,) = partials(tmp_path)
            os.utime(tmp_path / partial, (0, 0))
            look()
            assert partials(tmp_path) == [partial]
            assert storage.sweep(tmp_path) == (100 if kind == "replacing" else 0)
            running.send_signal(signal.SIGKILL)
            running.wait(60)
            look()
            assert partials(tmp_path) == []
            assert not (tmp_path / "a").exists()
        finally:
            running.kill()


def test_folders_appear_whole(tmp_path):
    (tmp_path / LEFT).mkdir()
    (tmp_path / LEFT / "weights").write_bytes(b"x")
    with storage.new_folder(tmp_path / "run") as folder:
        (folder / "weights").write_bytes(b"y")
        assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["weights"]
    assert partials(tmp_path) == []
    with pytest.raises(KeyError), storage.new_folder(tmp_path / "other"):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_temporary_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f".atlasjax-trace.{'0' * 16}.partial").mkdir()
    with storage.temporary_folder("trace") as folder:
        (folder / "a").write_bytes(b"")
        assert len(partials(tmp_path)) == 1
        assert [path.name for path in folder.iterdir()] == ["a"]
    assert partials(tmp_path) == []


def test_a_lock_is_one_processs(tmp_path):
    with locks.take(tmp_path / "lock"), pytest.raises(locks.HeldError, match=f"process {os.getpid()} on"):
        locks.take(tmp_path / "lock")
    locks.take(tmp_path / "lock").close()
    (tmp_path / "link").symlink_to("precious")
    with pytest.raises(OSError, match="link"):
        locks.take(tmp_path / "link")


def test_a_home_folder_that_is_not_known():
    assert str(storage.expanded("~")) == os.path.expanduser("~")
    with pytest.raises(ValueError, match=r"'~no-such-user/x' names a folder that is not known here"):
        storage.expanded("~no-such-user/x")
