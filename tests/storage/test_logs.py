"""A log in a store is a folder of parts, and reads like the file that it would be on a disk."""

import errno
import pathlib

import pytest

from atlasjax import storage
from atlasjax.storage import logs


@pytest.fixture(params=["disk", "memory"])
def path(request, tmp_path):
    made = storage.path(tmp_path if request.param == "disk" else "memory://logs") / "x.jsonl"
    yield made
    if request.param == "memory" and made.exists():
        made.rmtree()


def test_what_is_appended_is_read(path):
    assert storage.read_log(path) == b""
    for number in range(3):
        log = storage.open_log(path)
        assert log.empty == (number == 0)
        log.append(b"a")
        log.commit()
        log.append(str(number).encode())
        log.close()
    assert storage.read_log(path) == b"a\n0\na\n1\na\n2\n"


def test_parts_are_written_once_and_in_order(monkeypatch):
    folder = storage.path("memory://parts/x.jsonl")
    log = logs.PartsLog(folder)
    for number in range(12):
        log.append(str(number).encode())
        log.commit()
        log.commit()  # of nothing
    assert [file.name for file in folder.files()] == [f"{number:08d}" for number in range(12)]
    assert storage.read_log(folder) == b"".join(b"%d\n" % number for number in range(12))
    monkeypatch.setattr(logs, "_SECONDS", 0.0)
    log.append(b"late")
    assert (folder / "00000012").read_bytes() == b"late\n"
    folder.rmtree()


def test_lines_that_cannot_be_written_come_with_the_next_part(monkeypatch):
    folder = storage.path("memory://failing/x.jsonl")
    log = logs.PartsLog(folder)

    def fails(path, content):
        raise storage.StoreError("away")

    monkeypatch.setattr(logs, "_SECONDS", 0.0)
    with monkeypatch.context() as away:
        away.setattr(storage.StorePath, "write_bytes", fails)
        log.append(b"1")
        log.append(b"2")
        with pytest.raises(storage.StoreError):
            log.commit()
    log.append(b"3")
    assert storage.read_log(folder) == b"1\n2\n3\n"
    folder.rmtree()


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "x.jsonl"
    path.symlink_to("/dev/full")
    log = storage.open_log(path)
    for write in (lambda: log.append(b"1"), log.close):  # closing writes again what could not be written
        with pytest.raises(OSError, match=r"No space left on device: '.*/x.jsonl'") as caught:
            write()
        assert caught.value.errno == errno.ENOSPC


def test_a_copy_on_a_disk_is_read_too(tmp_path):
    folder = storage.path("memory://copied/x.jsonl")
    log = logs.PartsLog(folder)
    for line in (b"1", b"2"):
        log.append(line)
        log.commit()
    for file in folder.files():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert storage.read_log(tmp_path) == storage.read_log(folder) == b"1\n2\n"
    folder.rmtree()
