"""experiments/function_learning: the mappings are what they say, a step is what its formula says, a stopped run goes on."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.function_learning import learner, mappings, report, run
from experiments.function_learning.results import Store, identity
from experiments.rows import read_rows
from tests.marks import some_slow

SIZES = mappings.Sizes(dim=6, length=11, rank=2, window=4)


def dependence(monkeypatch, setting):
    """[t, t] booleans: whether o_j depends on the drawn input of token k."""
    drawn = jax.random.normal(jax.random.key(7), (SIZES.length, SIZES.dim))

    def outputs(x):
        monkeypatch.setattr(mappings, "_inputs", lambda key, sizes: x)
        return mappings.sample(setting, 0, SIZES)[1]

    return np.asarray(jnp.abs(jax.jit(jax.jacobian(outputs))(drawn)).sum((1, 3)) > 0)


def test_outputs_depend_on_the_tokens_they_should(monkeypatch):
    j, k = np.indices((SIZES.length, SIZES.length))
    wanted = {
        "low_rank": j == k,
        "mlp": j == k,
        "attention_mlp": k <= j,
        "attention_as_input": k <= j,
        "window_attention_mlp": (k <= j) & (k > j - SIZES.window),
    }
    assert list(wanted) == list(mappings.MAPPINGS) == list(run.SETTINGS)
    for setting, mask in wanted.items():
        np.testing.assert_array_equal(dependence(monkeypatch, setting), mask, err_msg=setting)


def test_low_rank_is_linear_of_that_rank_and_the_mlp_is_not():
    sizes = mappings.Sizes(dim=12, length=64, rank=3)
    for setting, linear in (("low_rank", True), ("mlp", False)):
        i, o = (np.asarray(x, np.float64) for x in mappings.sample(setting, 1, sizes))
        w, *_ = np.linalg.lstsq(i, o, rcond=None)
        share = ((i @ w - o) ** 2).sum() / (o**2).sum()
        assert (share < 1e-10) if linear else (share > 0.02)
        assert np.linalg.matrix_rank(o, tol=1e-4) == (3 if linear else 12)
        assert 0.5 < o.std() < 2 if linear else 0.2 < o.std() < 2


@pytest.mark.parametrize("window", [None, 3])
def test_attention_by_hand(window):
    x = jax.random.normal(jax.random.key(0), (7, 4))
    w_q, w_k, w_v = (np.asarray(jax.random.normal(k, (4, 4))) / 2 for k in jax.random.split(jax.random.key(1), 3))
    expected = []
    for j in range(7):
        seen = np.asarray(x)[0 if window is None else max(0, j - window + 1) : j + 1]
        weights = np.exp(seen @ w_k.T @ (w_q @ np.asarray(x)[j]) / 2)
        expected.append(weights / weights.sum() @ (seen @ w_v.T))
    actual = mappings.causal_attention(jax.random.key(1), x, window)
    np.testing.assert_allclose(actual, np.stack(expected), atol=2e-6)


def test_setting_four_is_setting_three_seen_from_the_attention():
    """Its outputs are those of setting 3, and one map of its own inputs: the same input in two sequences has one output."""
    a, o = mappings.sample("attention_as_input", 3, SIZES)
    i, same = mappings.sample("attention_mlp", 3, SIZES)
    np.testing.assert_array_equal(o, same)
    _, k_attention, k_mlp = jax.random.split(jax.random.key(3), 3)
    np.testing.assert_allclose(a, mappings.causal_attention(k_attention, i), atol=1e-6)
    np.testing.assert_allclose(mappings.random_mlp(k_mlp, SIZES.dim)(a[5]), o[5], atol=1e-6)


def test_a_step_is_the_gradient_of_the_relative_error():
    structure = learner.memory(hidden_layers=2, expansion=3)
    weights = structure.init(jax.random.key(0), 4, 4)
    assert {name: w.shape for name, w in weights.items()} == {"W1": (4, 12), "W2": (12, 12), "W3": (12, 4)}
    i, o = jax.random.normal(jax.random.key(1), (2, 4))
    gelu = lambda x: jax.nn.gelu(x, approximate=True)

    def loss(w):
        return jnp.sum((w["W1"] @ gelu(w["W2"] @ gelu(w["W3"] @ i)) - o) ** 2) / jnp.sum(o**2)

    optimizer = optax.sgd(0.1)
    step = jax.jit(lambda carry, pair: learner.inner_step(structure, optimizer, carry, pair))
    (after, _), before = step((weights, optimizer.init(weights)), (i, o))
    np.testing.assert_allclose(before, loss(weights), rtol=1e-6)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.jit(jax.grad(loss))(weights))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after, expected)


@pytest.mark.parametrize("name", some_slow(learner.OPTIMIZERS, ["adam", "rmsprop"]))
def test_learning_is_a_loop_of_optax_steps(name):
    """Two memories side by side against one at a time, token by token; Muon against optax's own, whose matrices are [in, out]."""
    structure, seeds, rates = learner.memory(1, 2), [4, 5], [0.03, 0.01]
    pairs = [mappings.sample("mlp", seed, mappings.Sizes(4, 7, rank=2)) for seed in seeds]
    inputs, outputs = (jnp.stack([p[k] for p in pairs]) for k in (0, 1))
    pieces = list(learner.learn(structure, name, jnp.array(rates), jnp.array(seeds), inputs, outputs, piece=4))
    assert [p.shape for p in pieces] == [(2, 4), (2, 3)]
    theirs = {"sgd": optax.sgd, "rmsprop": optax.rmsprop, "adam": optax.adam}
    theirs["muon"] = lambda rate: optax.contrib.muon(rate, nesterov=False)
    loss = lambda w, i, o: learner.relative_error(structure, jax.tree.map(jnp.transpose, w), i, o)
    for n, seed in enumerate(seeds):
        weights = structure.init(jax.random.fold_in(jax.random.key(seed), 1), 4, 4)
        weights = jax.tree.map(jnp.transpose, weights)
        optimizer = theirs[name](rates[n])
        state, expected = optimizer.init(weights), []
        step = jax.jit(
            lambda w, s, i, o, optimizer=optimizer: (loss(w, i, o), optimizer.update(jax.grad(loss)(w, i, o), s, w))
        )
        for i, o in zip(*pairs[n], strict=True):
            value, (updates, state) = step(weights, state, i, o)
            weights = optax.apply_updates(weights, updates)
            expected.append(value)
        actual = np.concatenate(pieces, axis=1)[n]
        # Newton–Schulz of the rank-one first momentum amplifies rounding; optax's epsilon is another.
        np.testing.assert_allclose(actual, expected, rtol=2e-3 if name == "muon" else 2e-5)
        assert actual[-1] != pytest.approx(actual[0])


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    grid = run.Grid(8, 256, 8, 16, ((1, 1),), ("sgd", "muon"), sweep_dim=6)
    monkeypatch.setitem(run.PLANS, "quick", (grid,))
    monkeypatch.setattr(run, "RATES", {"sgd": (0.01, 1e6), "muon": (0.01,)})
    return ["quick", "--settings", "low_rank", "mlp", "--out", str(tmp_path)], tmp_path


@pytest.mark.slow  # of the functions that the other experiments resume by
def test_a_stopped_run_goes_on_and_writes_its_table(tiny, monkeypatch, capsys):
    arguments, folder = tiny
    losses, calls = run.losses, []

    def counted(cell, rates, seeds, say):
        calls.append((cell["kind"], cell["setting"], cell["optimizer"], cell["dim"], list(seeds)))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return losses(cell, rates, seeds, say)

    monkeypatch.setattr(run, "losses", counted)
    assert run.main([*arguments, "--seeds", "1"]) == 130
    assert calls[:2] == [("sweep", "low_rank", "sgd", 6, [100, 100]), ("run", "low_rank", "sgd", 8, [0])]
    assert (folder / "table.md").exists()  # of what there is
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"kind": "run", "dim"')  # killed while writing
    assert run.main([*arguments, "--seeds", "1"]) == 0
    assert calls[4] == calls[3]
    assert "cut short" in capsys.readouterr().out
    done = len(calls)
    assert run.main([*arguments, "--seeds", "2"]) == 0
    assert [c[-1] for c in calls[done:]] == [[1]] * 4
    before = (folder / "results.jsonl").read_text()
    assert run.main([*arguments, "--seeds", "2"]) == 0
    assert (folder / "results.jsonl").read_text() == before

    rows = [json.loads(line) for line in before.splitlines()]
    assert len({identity(row) for row in rows}) == len(rows) == 2 * 2 + 2 * 3 + 2 * 2 * 2
    diverged = [row for row in rows if row["learning_rate" if row["kind"] == "sweep" else "seed"] == 1e6]
    assert [row["last"] for row in diverged] == [None, None]
    runs = [row for row in rows if row["kind"] == "run"]
    assert {row["learning_rate"] for row in runs if row["optimizer"] == "sgd"} == {0.01}
    assert all(len(row["curve"]) == 4 and row["last"] == pytest.approx(np.mean(row["curve"]), rel=1e-4) for row in runs)
    table = (folder / "table.md").read_text()
    values = [row["last"] for row in runs if (row["setting"], row["optimizer"]) == ("low_rank", "sgd")]
    assert f"{np.mean(values):.3f} ({min(values):.3f}–{max(values):.3f}) at 0.01" in table
    assert (folder / "loss_d8.png").read_bytes()[:4] == b"\x89PNG"


def test_bad_input_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="rank must be at most dim = 4, got 5"):
        mappings.Sizes(dim=4, rank=5)
    with pytest.raises(ValueError, match="window must be an integer ≥ 1, got 0"):
        mappings.Sizes(window=0)
    with pytest.raises(ValueError, match="low_rank"):
        mappings.sample("low_rnak", 0, SIZES)
    with pytest.raises(SystemExit):
        run.parse(["--seeds", "0"])
    assert "--seeds must be from 1" in capsys.readouterr().err
    (tmp_path / "results.jsonl").write_text("not JSON\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        Store.open(tmp_path / "results.jsonl")


def test_rows_are_where_the_page_of_evidence_reads_them(tmp_path, capsys):
    assert run.parse([]).out == run.HERE
    assert read_rows(run.HERE / "results.jsonl")
    assert run.parse(["quick"]).out != run.HERE  # short sequences would stand beside those of the results
    with pytest.raises(SystemExit):
        run.parse(["--report", "--out", str(tmp_path)])
    assert "results.jsonl has no rows" in capsys.readouterr().err


def test_the_report_counts_seeds():
    shape = {"kind": "run", "dim": 8, "length": 256, "hidden_layers": 2, "expansion": 1, "learning_rate": 0.1}
    values = {
        ("attention_mlp", "sgd"): (0.7, 0.9, None),
        ("window_attention_mlp", "sgd"): (0.8, 0.8, 0.8),
        ("attention_mlp", "adam"): (0.6, 0.95, 2.0),
        ("window_attention_mlp", "adam"): (0.9, 0.9, 0.9),
    }
    rows = [
        {**shape, "setting": setting, "optimizer": name, "seed": seed, "last": last}
        for (setting, name), losses in values.items()
        for seed, last in enumerate(losses)
    ]
    text = report.table(rows)
    assert "| SGD | 1 of 3 | 0 of 0 |" in text
    assert "| Adam | 1 of 3 | 0 of 0 |" in text
    assert "diverged in 1 of 3 at 0.1" in text
    assert "1.183 (0.600–2.000) at 0.1" in text
    winners = next(line for line in text.splitlines()[::-1] if line.startswith("| d = 8"))
    assert "| Adam, SGD, Adam |" in winners  # a diverged memory does not win
    assert winners.endswith("| SGD |")
