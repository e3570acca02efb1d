"""States in files: bit for bit, and refused where they do not belong."""

import dataclasses
import json
import pathlib
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import objectives
from tests.memory.own_family import MovingSum

SIZES = {"num_heads": 2, "key_dim": 4, "value_dim": 4}
OMEGANET = rules.omeganet(chunk_size=8, window=3)
CASES = {
    "omeganet": OMEGANET,
    "matrix with channels": rules.gla(),
    "softmax with all tokens": rules.deep_transformer(chunk_size=4),
    "cached": memory.CachedRule(OMEGANET, "grm", segment_size=16),
    "own": MovingSum(),
}


def made(rule, seed=0, dtype=jnp.float32):
    """Parameters, and a state of three rows whose floats are random."""
    params = memory.init_params(rule, jax.random.key(seed), **SIZES)
    rng = np.random.default_rng(seed)
    state = memory.init_state(rule, params, batch_size=3, max_length=40)
    random = lambda x: jnp.asarray(rng.normal(size=x.shape), dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x + 1
    return params, jax.tree.map(random, state)


@pytest.mark.parametrize("rule", CASES.values(), ids=CASES)
def test_round_trip(rule, tmp_path):
    params, state = made(rule)
    memory.save(rule, params, state, tmp_path / "a.memory", num_tokens=7)
    loaded = memory.load(rule, params, str(tmp_path / "a.memory"))
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for have, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)
    assert [path.name for path in tmp_path.iterdir()] == ["a.memory"]


def test_float64(tmp_path):
    with jax.enable_x64(True):
        params, state = made(OMEGANET, dtype=jnp.float64)
        memory.save(OMEGANET, params, state, tmp_path / "a.memory")
        loaded = memory.load(OMEGANET, params, tmp_path / "a.memory")
        np.testing.assert_array_equal(loaded.memory["W1"], state.memory["W1"])
    with pytest.raises(ValueError, match=r"float64, which needs jax.config"):
        memory.load(OMEGANET, params, tmp_path / "a.memory")


def test_where_it_cannot_be_written(tmp_path):
    params, state = made(OMEGANET)
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*none'"):
        memory.save(OMEGANET, params, state, tmp_path / "none" / "a.memory")
    with pytest.raises(TypeError, match=r"memory\.save: state has no values while it is traced"):
        jax.jit(lambda state: memory.save(OMEGANET, params, state, tmp_path / "a.memory"))(state)
    assert not list(tmp_path.iterdir())


def test_in_a_store():
    params, state = made(CASES["own"])
    memory.save(CASES["own"], params, state, "memory://bucket/a.memory")
    np.testing.assert_array_equal(memory.load(CASES["own"], params, "memory://bucket/a.memory").sums, state.sums)


def header(path: pathlib.Path) -> dict:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


def test_the_file(tmp_path):
    """Any reader of safetensors finds the arrays by their names, and what they belong to in the metadata."""
    safetensors = pytest.importorskip("safetensors.numpy")
    params, state = made(OMEGANET)
    memory.save(OMEGANET, params, state, tmp_path / "a.memory", num_tokens=7)
    arrays = safetensors.load_file(tmp_path / "a.memory")
    np.testing.assert_array_equal(arrays["state.memory.W1"], state.memory["W1"])
    metadata = header(tmp_path / "a.memory")["__metadata__"]
    about = json.loads(metadata["about"])
    assert (metadata["atlasjax"], metadata["kind"]) == ("0.1.0", "the state of a memory")
    assert (about["num_tokens"], about["batch_size"], about["sizes"]) == (7, 3, SIZES)
    assert (about["rule"]["class"], about["rule"]["window"]) == ("MemoryRule", 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 2}, "rule.window is 3 in the file and 2 here"),
        ({"chunk_size": 4}, "rule.chunk_size is 8 in the file and 4 here"),
        ({"objective": objectives.DotProduct()}, "rule.objective.class is 'L2' in the file and 'DotProduct' here"),
        ({"bound": None}, "rule.bound is {.*} in the file and None here"),
    ],
)
def test_another_rule(changes, words, tmp_path):
    params, state = made(OMEGANET)
    memory.save(OMEGANET, params, state, tmp_path / "a.memory")
    with pytest.raises(ValueError, match=f"'.*a.memory' was saved with another memory: {words}"):
        memory.load(dataclasses.replace(OMEGANET, **changes), params, tmp_path / "a.memory")


def test_other_sizes_and_parameters(tmp_path):
    params, state = made(OMEGANET)
    memory.save(OMEGANET, params, state, tmp_path / "a.memory")
    larger = memory.init_params(OMEGANET, jax.random.key(0), num_heads=2, key_dim=8, value_dim=8)
    with pytest.raises(ValueError, match=r"sizes.key_dim is 4 in the file and 8 here"):
        memory.load(OMEGANET, larger, tmp_path / "a.memory")
    with pytest.raises(ValueError, match=r"a.memory' was saved with other parameters; give those"):
        memory.load(OMEGANET, made(OMEGANET, seed=1)[0], tmp_path / "a.memory")
    with pytest.raises(TypeError, match=r"memory.save: state must be a MemoryState, got State"):
        memory.save(OMEGANET, params, made(MovingSum())[1], tmp_path / "b.memory")


def test_damaged_files(tmp_path):
    params, state = made(OMEGANET)
    whole = tmp_path / "a.memory"
    memory.save(OMEGANET, params, state, whole)
    content = whole.read_bytes()
    damaged = tmp_path / "b.memory"
    load = lambda: memory.load(OMEGANET, params, damaged)
    with pytest.raises(FileNotFoundError, match=r"b.memory' does not exist"):
        load()
    for size in (0, 5, 100, len(content) // 2, len(content) - 1):
        damaged.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"b.memory' is damaged or not a file of the state of a memory"):
            load()
    for place in (len(content) - 1, content.index(b'window\\":') + 10):  # a number of a tensor, and one of the rule
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"b.memory' is damaged: its content is not what was saved"):
            load()
    damaged.write_bytes(b"PK\x03\x04" + b"no tensors" * 50)
    with pytest.raises(ValueError, match="damaged or not a file of"):
        load()
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"x": np.zeros(3)}, damaged)
    with pytest.raises(ValueError, match="is a file of other tensors; it must be one of the state of a memory"):
        load()
    damaged.write_bytes(content.replace(b'"format":"1"', b'"format":"9"'))
    with pytest.raises(ValueError, match=r"written by atlasjax 0.1.0 in format 9; atlasjax 0.1.0 reads format 1"):
        load()
    with pytest.raises(ValueError, match="is a folder"):
        memory.load(OMEGANET, params, tmp_path)


def test_nothing_half_written(tmp_path, monkeypatch):
    params, state = made(MovingSum())
    memory.save(MovingSum(), params, state, tmp_path / "a.memory")
    before = (tmp_path / "a.memory").read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(pathlib.Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        memory.save(MovingSum(), params, jax.tree.map(lambda x: x + 1, state), tmp_path / "a.memory")
    assert [path.name for path in tmp_path.iterdir()] == ["a.memory"]
    assert (tmp_path / "a.memory").read_bytes() == before


def test_a_rule_that_a_file_cannot_describe(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Odd(MovingSum):
        function: object = len

    params, state = made(Odd())
    with pytest.raises(
        TypeError, match=r"memory.save: rule.function is a builtin_function_or_method, which a file cannot"
    ):
        memory.save(Odd(), params, state, tmp_path / "a.memory")
    assert not list(tmp_path.iterdir())
