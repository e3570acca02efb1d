"""experiments/capacity: memories fill their budget, pairs are shared by seed, and what is recalled is what the rule has written."""

import json

import jax
import numpy as np
import pytest

from atlasjax import memory, rules
from experiments.capacity import run
from experiments.capacity.measure import KEYS, Recipe, draw, read_back
from experiments.capacity.memories import MEMORIES, VALUE_DIM, Memory, connector, floats, shapes
from experiments.capacity.report import area, capacity

GATES = [{"step_size": 1.0, "momentum_decay": 0.0, "window_decay": 1.0}]


@pytest.mark.parametrize(
    "name",
    ["linear", "linear, c=4", "polynomial 2", "sketch 2", "deep 2", "deep 3", "linear, Muon", "linear, GRM", "deep 2, Soup",
     "linear, own erasing rate", "mesa", "mesa, exact, sums of keys free", "deep 2, momentum, TNT"],
)  # fmt: skip
def test_memories_fill_their_budget(name):
    free = MEMORIES[name].free
    for shape in shapes(name, 1024):
        assert 800 <= floats(shape, free) <= 1024
    assert floats(shapes("linear", 1024)[0]) == 1024
    (one,) = shapes("linear, c=4", 1024)
    earlier = 3 * (one.key_dim + VALUE_DIM)  # the pairs of the window
    assert floats(one) == VALUE_DIM * one.key_dim + earlier
    (free_one,) = shapes("linear, c=4, buffers free", 1024)
    assert floats(free_one, free=True) == 1024 < floats(free_one)
    (cached,) = shapes("linear, GRM", 1024)  # 40 pairs: two cached memories of 16, and the one that is written
    assert floats(cached, pairs=40) == 3 * (1024 + cached.key_dim)


def test_a_regression_and_a_hierarchy_count_all_they_carry():
    (mesa,) = shapes("mesa", 1024)
    assert floats(mesa) == mesa.key_dim**2 + VALUE_DIM * mesa.key_dim
    (free,) = shapes("mesa, sums of keys free", 1024)
    assert floats(free, free=True) == 1024
    alone, tnt = (shapes(f"deep 2, momentum{name}", None)[0] for name in ("", ", TNT"))
    coarse = shapes("deep 2, momentum, chunks of 16, buffers free", None)[0]
    assert floats(tnt) == floats(alone) + floats(coarse) + tnt.key_dim**2  # P of the queries


def test_erasing_what_is_written_is_the_delta_rule():
    """And another rate is not: W + η (v − b W k) kᵀ."""
    (own,), (delta,) = shapes("linear, own erasing rate", 256), shapes("linear", 256)
    read = lambda shape, **more: read_back(
        shape, "topics", 1, [{**GATES[0], "step_size": 0.4, **more}], [0, 1, 2], [8, 16, 64]
    )
    for one, other in zip(read(own, erasing=1.0), read(delta), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(read(own, erasing=0.5)[0], read(delta)[0])


def test_a_constant_write_gate_is_a_step_size():
    """So Momentum DeltaNet's rule without decay has the rows of "linear, momentum"."""
    (shape,) = shapes("linear, momentum", None)
    keys, values = draw("topics", shape.key_dim, 12, seed=0)
    k, v = keys[None, :, None], values[None, :, None]
    params = memory.init_params(shape.rule, jax.random.key(0), num_heads=1, key_dim=16, value_dim=VALUE_DIM)
    momentum = memory.Gates(step_size=0.2, momentum_decay=0.5)
    published = memory.Gates(retention=1.0, step_size=0.4, momentum_decay=0.5, write_size=0.5)
    one, _ = memory.scan(shape.rule, params, None, k, k, v, momentum)
    other, _ = memory.scan(rules.momentum_delta(), params, None, k, k, v, published)
    np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_what_does_not_fit_has_no_shape():
    assert shapes("linear, c=16", 256) == ()
    assert shapes("polynomial 2", None)[0].key_dim == 16


@pytest.mark.parametrize("kind", list(KEYS))
def test_pairs(kind):
    dim, cosine, topic = KEYS[kind]
    keys, values = draw(kind, 32, 200, seed=3)
    for drawn in (keys, values):
        np.testing.assert_allclose(np.linalg.norm(drawn, axis=-1), 1, atol=1e-5)
    assert np.linalg.matrix_rank(keys) == min(dim, 32)
    of = np.arange(200) // (topic or 200)
    same = of[:, None] == of
    cosines = keys @ keys.T
    assert abs(cosines[same & ~np.eye(200, dtype=bool)].mean() - cosine) < 0.15
    if topic:
        assert abs(cosines[~same].mean()) < 0.15
    np.testing.assert_array_equal(values, draw(kind, 8, 200, seed=3)[1])  # a seed has the same pairs for every memory
    assert not np.array_equal(values, draw(kind, 32, 200, seed=4)[1])


def test_a_matrix_holds_as_many_pairs_as_its_keys_have_dimensions():
    """With many passes at η = 1 the delta rule (Kaczmarz) solves W k_i = v_i exactly for fewer pairs than dimensions."""
    (shape,) = shapes("linear", 256)
    assert shape.key_dim == 16
    recalled, stored = read_back(shape, "independent", 100, GATES, [0, 1], [4, 8, 64])
    assert recalled.shape == stored.shape == (1, 2, 3)
    np.testing.assert_array_equal(stored[0, :, :2], 1)
    assert stored[0, :, 2].max() < 0.3
    assert recalled[0, :, 2].max() < 0.7


@pytest.mark.parametrize(
    "name", ["linear, GRM", "linear, SSC", "linear, Residual", "linear, Log-Linear", "deep 2, Soup"]
)
def test_one_segment_is_the_memory_alone_and_more_are_not(name):
    (cached,), (alone,) = shapes(name, None), shapes(name.split(",")[0], None)
    gates = [{**GATES[0], "step_size": 0.2, "connector": 1.0}]
    read = lambda shape: read_back(shape, "topics", 1, gates, [0, 1], [8, 16, 96])
    for one, other in zip(read(cached), read(alone), strict=True):
        np.testing.assert_array_equal(one[..., :2], other[..., :2])
    assert not np.array_equal(read(cached)[0][..., 2], read(alone)[0][..., 2])


def test_gates_of_caches_see_the_query():
    (shape,) = shapes("linear, GRM", None)
    q = np.ones((1, 3, 1, 16), np.float32)
    np.testing.assert_array_equal(connector(shape, q, 4.0), 4 * q)
    (levels,) = shapes("linear, Log-Linear", None)
    weights = np.log1p(np.exp(connector(levels, q, 2.0)))  # softplus, as the rule has it
    np.testing.assert_allclose(weights[0, 0, 0, :4], [1, 1, 2, 4], rtol=1e-5)
    for plain in ("linear", "linear, Residual"):
        assert connector(shapes(plain, None)[0], q, 4.0) is None


def test_caching_reads_a_text_once(tmp_path, capsys):
    options = ["--budgets", "0", "--pairs", "2", "4", "--seeds", "2", "--tuning-seeds", "1", "--keys", "topics"]
    run.main([*options, "--memories", "linear, GRM", "--passes", "1", "30", "--out", str(tmp_path)])
    (line,) = (tmp_path / "capacity.jsonl").read_text().splitlines()
    assert json.loads(line)["passes"] == 1
    assert "because they read each pair once: linear, GRM." in capsys.readouterr().out


def test_capacity_is_where_the_curve_falls_below_for_good():
    pairs = [2, 4, 8, 16]
    assert capacity(np.array([1, 1, 1, 1.0]), pairs) == 16
    assert capacity(np.array([0.5, 0.4, 0.3, 0.2]), pairs) == 1
    assert capacity(np.array([0.8, 1, 1, 0.8]), pairs) == pytest.approx(8 * 2**0.5)
    np.testing.assert_allclose(capacity(np.array([[1, 1, 1, 0.8], [1, 0.9, 0.1, 0]]), pairs), [8 * 2**0.5, 4])


def test_one_more_area_is_twice_as_many_pairs():
    row = lambda fractions: {"recalled": [fractions], "recipe": {"pairs": [2, 4, 8, 16, 32]}}
    (small,), (large,) = area(row([1, 1, 0.5, 0, 0])), area(row([1, 1, 1, 0.5, 0]))
    assert large - small == pytest.approx(1)


@pytest.mark.slow  # of the functions that the other experiments resume by
def test_rows_are_kept_and_resumed(tmp_path, monkeypatch, capsys):
    options = [
        *["--budgets", "128", "--seeds", "3", "--tuning-seeds", "2", "--pairs", "2", "8", "32", "--out"],
        str(tmp_path),
    ]
    run.main([*options, "--memories", "linear", "--passes", "1", "--keys", "independent"])
    (line,) = (tmp_path / "capacity.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["memory"], row["budget"], row["floats"], row["keys"]) == ("linear", 128, 128, "independent")
    assert np.shape(row["recalled"]) == np.shape(row["stored"]) == (3, 3)
    assert np.mean(row["recalled"], 0)[0] > np.mean(row["recalled"], 0)[2]
    assert (tmp_path / "capacity_128.png").stat().st_size > 5_000
    assert "| linear | 128 | 128 |" in capsys.readouterr().out
    monkeypatch.setattr(run, "read_back", lambda *_: pytest.fail("measured again"))
    run.main([*options, "--memories", "linear", "--passes", "1", "--keys", "independent"])
    with pytest.raises(ValueError, match="rows of another recipe"):
        run.main(["--seeds", "4", *options[4:]])


def test_recipe_and_memories():
    assert Recipe().seeds >= 5
    assert all(isinstance(memory, Memory) for memory in MEMORIES.values())
