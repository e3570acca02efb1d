"""Memories under names: kept in files, until they are too old or too many."""

import functools
import os
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import storage
from atlasjax.generate import Context, ContextFiles
from atlasjax.nn import LanguageModel, MemoryConfig, ModelConfig
from atlasjax.serve.memories import InUseError, Memories, MemoryLimits, steady_time

CONFIG = ModelConfig(
    vocab_size=8, dim=4, num_layers=1, num_heads=1, mlp_dim=4, dtype="float32", mixer="memory",
    memory=MemoryConfig(rule="linear_attention", chunk_size=4),
)  # fmt: skip


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def files() -> ContextFiles:
    return ContextFiles(model())


@functools.cache
def text(number: int) -> Context:
    """A context that is known by its number of tokens, and was not computed."""
    logits, seen = jnp.full((1, 8), number, jnp.float32), np.zeros((1, 8), bool)
    return Context(model().init_cache(1, 8), logits, seen, np.array([number], np.int32), 8)


class Clock:
    now = 1e9

    def __call__(self) -> float:
        self.now += 1
        return self.now


def names(memories):
    return [entry.name for entry in memories.entries()]


def test_kept_and_restored(tmp_path):
    memories = Memories(files(), tmp_path / "kept", clock=Clock())
    assert memories.load("a") is None
    memories.save("a", text(1))
    memories.save("b.2_-", text(2))
    memories.save("a", text(3))
    again = Memories(files(), tmp_path / "kept", clock=Clock())
    assert (again.load("a").num_tokens[0], again.load("b.2_-").num_tokens[0]) == (3, 2)
    np.testing.assert_array_equal(again.load("a").logits, text(3).logits)
    assert names(again) == ["a", "b.2_-"]
    assert again.delete("a")
    assert not again.delete("a")
    assert again.load("a") is None


def test_the_least_recently_used_goes_first(tmp_path):
    memories = Memories(files(), tmp_path, MemoryLimits(count=3), Clock())
    for number, name in enumerate("abc"):
        memories.save(name, text(number))
    memories.load("a")
    memories.save("d", text(3))
    assert names(memories) == ["d", "a", "c"]
    with memories.use("c"):
        memories.save("e", text(4))
        assert names(memories) == ["e", "d", "a", "c"]  # c is in use, and a was inside the limit without it
    memories.sweep()
    assert names(memories) == ["e", "d", "a"]
    size = memories.entries()[0].num_bytes
    assert names(Memories(files(), tmp_path, MemoryLimits(gigabytes=2.5 * size / 1e9), Clock())) == ["e", "d"]


def test_what_nobody_uses_expires(tmp_path):
    clock = Clock()
    memories = Memories(files(), tmp_path, MemoryLimits(hours=1), clock)
    memories.save("a", text(1))
    memories.save("b", text(2))
    clock.now += 3000
    memories.load("a")
    clock.now += 3000
    assert memories.load("b") is None
    assert names(memories) == ["a"]
    (tmp_path / "notes.txt").write_text("of somebody else")
    clock.now += 10**6
    assert names(memories) == []
    assert (tmp_path / "notes.txt").exists()


def test_refused(tmp_path):
    memories = Memories(files(), tmp_path)
    for name in ("", "../a", ".a", "a/b", "a" * 101, "ä", "a\n", None):
        with pytest.raises(ValueError, match="it must be 1 to 100 letters"):
            memories.load(name)
    with memories.use("a"):
        with pytest.raises(InUseError, match="memory 'a' is in use by another request"), memories.use("a"):
            pass
        with pytest.raises(InUseError):
            memories.delete("a")
        with memories.use("b"):
            pass
    with memories.use("a"):
        pass
    memories.save("a", text(1))
    (tmp_path / "a.memory").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"^memory 'a' is damaged or not a file of"):
        memories.load("a")
    for fields in ({"hours": 0}, {"count": 0}, {"gigabytes": float("nan")}):
        with pytest.raises(ValueError, match=f"memories: {next(iter(fields))} must be"):
            MemoryLimits(**fields)


def test_only_the_owner_may_read(tmp_path):
    memories = Memories(files(), tmp_path / "kept")
    memories.save("a", text(1))
    mode = lambda path: path.stat().st_mode & 0o777
    assert (mode(tmp_path / "kept"), mode(tmp_path / "kept/a.memory")) == (0o700, 0o600)
    del memories


def test_a_folder_that_others_may_read_is_made_private_or_refused(tmp_path, capsys):
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "a.memory").write_bytes(b"")
    (folder / "a.memory").chmod(0o644)
    (folder / "notes.txt").write_text("of somebody else")
    with pytest.raises(
        ValueError, match=r"which others may use and which has 'notes.txt' too\. Give a folder of its own"
    ):
        Memories(files(), folder)
    assert folder.stat().st_mode & 0o777 == 0o755
    (folder / "notes.txt").unlink()
    Memories(files(), folder)
    assert (folder.stat().st_mode & 0o777, (folder / "a.memory").stat().st_mode & 0o777) == (0o700, 0o600)
    assert "from now on only this user can" in capsys.readouterr().err


def test_what_is_no_file_is_left_alone_and_named_once(tmp_path, capsys):
    """A FIFO is not waited for, and a link is not followed."""
    (tmp_path / "precious").write_bytes(b"of another")
    (tmp_path / "dead.memory").symlink_to("nowhere")
    (tmp_path / "link.memory").symlink_to("precious")
    (tmp_path / "folder.memory").mkdir()
    os.mkfifo(tmp_path / "fifo.memory")
    memories = Memories(files(), tmp_path, MemoryLimits(count=1))
    memories.save("a", text(1))
    assert names(memories) == ["a"]
    said = capsys.readouterr().err
    for name in ("dead", "link", "folder", "fifo"):
        assert said.count(f"{name}.memory' is not a file; it is left alone") == 1
        for call in (memories.load, memories.delete):
            with pytest.raises(ValueError, match=f"memory '{name}' is not a file in the server's folder"):
                call(name)
        assert os.path.lexists(tmp_path / f"{name}.memory")
    assert (tmp_path / "precious").read_bytes() == b"of another"


def test_a_clock_that_was_set_back_removes_nothing_that_was_used(tmp_path):
    clock = Clock()
    memories = Memories(files(), tmp_path, MemoryLimits(count=3, hours=1), clock)
    for name in "abc":
        memories.save(name, text(1))
    clock.now -= 10**6
    memories.save("d", text(1))
    memories.load("b")
    memories.sweep()
    assert names(memories) == ["b", "d", "c"]
    again = Memories(files(), tmp_path, MemoryLimits(count=3, hours=1), clock)
    again.save("e", text(1))
    assert names(again) == ["e", "b", "d"]


def test_a_clock_that_is_set_while_the_server_runs_counts_for_nothing(monkeypatch):
    before = steady_time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= steady_time() < before + 60


def test_what_killed_writers_left_is_removed_and_what_is_written_counts(tmp_path):
    memories = Memories(files(), tmp_path)
    memories.save("a", text(1))
    size = memories.entries()[0].num_bytes
    left = tmp_path / f".a.memory.{'0' * 16}.partial"
    left.write_bytes(b"half")
    memories.sweep()
    assert not left.exists()
    few = Memories(files(), tmp_path, MemoryLimits(gigabytes=1.5 * size / 1e9))
    with storage.replacing(tmp_path / "b.memory") as writing:
        few.sweep()
        assert names(few) == ["a"]
        writing.write(b"x" * size)
        writing.flush()
        few.sweep()
        assert names(few) == []


OTHER = """
import pathlib, sys
from atlasjax.serve.memories import Lease
lease = Lease.of(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_one_server_at_a_time(tmp_path):
    """The lease of one that was killed is free."""
    command = [sys.executable, "-c", OTHER, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(
                ValueError, match=f"another server uses it .process {other.pid} on .* Give another folder"
            ):
                Memories(files(), tmp_path)
        finally:
            other.kill()
            other.wait()
    memories = Memories(files(), tmp_path)
    assert Memories(files(), tmp_path)._lease is memories._lease
