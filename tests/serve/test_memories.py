"""Memories under names: kept in files, until they are too old or too many."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.generate import Context, ContextFiles
from atlasjax.nn import LanguageModel, MemoryConfig, ModelConfig
from atlasjax.serve.memories import InUseError, Memories, MemoryLimits

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
        with pytest.raises(ValueError, match="it should be 1 to 100 letters"):
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
