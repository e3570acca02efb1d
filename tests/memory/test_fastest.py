"""atlasjax/memory/fast_weights/fastest.py: measured rows decide, malformed ones are refused."""

import json
import tomllib

import jax.numpy as jnp
import pytest

from atlasjax.memory.fast_weights.fastest import PATH, fastest, read

ROW = {
    "platform": "cuda", "kernel": "chunk_memory", "head_dim": 64, "dtype": "bfloat16", "implementation": "pallas_gpu",
    "ratio_to_xla": 3.0, "device": "NVIDIA H200", "jax": "0.10.2", "command": "python kernels_measured.py --record",
}  # fmt: skip


def table(folder, *changes):
    path = folder / "table.json"
    path.write_text(json.dumps([ROW | change for change in changes]))
    return path


def test_measured_rows_decide(tmp_path):
    tpu = {"platform": "tpu", "implementation": "pallas_tpu", "device": "TPU v5 lite"}
    path = table(
        tmp_path,
        {},
        tpu | {"ratio_to_xla": 1.05},  # within noise
        tpu | {"dtype": "float32", "ratio_to_xla": 2.0},
        {"kernel": "delta_rule", "ratio_to_xla": 0.0},  # wrong results
        {"head_dim": 128},
        {"head_dim": 128, "device": "NVIDIA A100", "ratio_to_xla": 0.7},
        {"head_dim": 128, "dtype": "float32"},
        tpu | {"head_dim": 128, "dtype": "float32"},
    )
    assert fastest("chunk_memory", 64, jnp.bfloat16, path) == {"cuda": "pallas_gpu"}
    assert fastest("chunk_memory", 64, "float32", path) == {"tpu": "pallas_tpu"}
    assert fastest("chunk_memory", 128, jnp.bfloat16, path) == {}, "one device of the platform is slower"
    assert fastest("chunk_memory", 128, jnp.float32, path) == {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}
    assert fastest("delta_rule", 64, jnp.bfloat16, path) == {}
    assert fastest("chunk_memory", 96, jnp.bfloat16, path) == {}, "another head dimension"
    assert fastest("chunk_memory", 64, jnp.float16, path) == {}
    with pytest.raises(ValueError, match="Did you mean 'chunk_memory'"):
        fastest("chunk_memry", 64, jnp.bfloat16, path)


def test_malformed_tables_are_refused(tmp_path):
    wrong = {
        "must be one of": {"platform": "rocm"},
        "kernel='attention'": {"kernel": "attention"},
        "dtype='float16'": {"dtype": "float16"},
        "must be 'pallas_gpu' on 'cuda'": {"implementation": "pallas_tpu"},
        "head_dim=64.0, must be an integer": {"head_dim": 64.0},
        "ratio_to_xla=nan": {"ratio_to_xla": float("nan")},
        "ratio_to_xla='3'": {"ratio_to_xla": "3"},
        "device='', must be a string": {"device": ""},
        r"row 2 has \['command'": {"speed": 1},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message) as caught:
            read(table(tmp_path, {"head_dim": 32}, change))
        assert "row 2" in str(caught.value)
    with pytest.raises(ValueError, match="row 2 repeats the row of"):
        read(table(tmp_path, {}, {"ratio_to_xla": 1.0}))
    for text, message in {"{": "is not JSON", "{}": "holds dict", "[3]": "row 1 has int"}.items():
        (tmp_path / "table.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "table.json")


def test_the_shipped_table_is_whole_and_part_of_the_package():
    for row in read():
        assert row.command.startswith(("python experiments/benchmarks/kernels_measured.py", "atlasjax tune"))
    with (PATH.parents[3] / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["atlasjax"]
    assert str(PATH.relative_to(PATH.parents[2])) in data
