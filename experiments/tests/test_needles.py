"""experiments/needles: every answer follows from what the text says, variants are the recurrence they name, rows are resumed."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.data.associative_recall import IGNORE
from experiments.evidence import sources
from experiments.needles import run
from experiments.needles.models import MODELS, Variant, model, variants
from experiments.needles.report import PUBLISHED, accuracy, table
from experiments.needles.tasks import ASK, BYTES, NAME, TASKS, VALUE, VOCAB_SIZE
from experiments.recall.training import language_model

SIZES = {"niah_1": 1, "niah_2": 1, "niah_3": 4, "multi_key": 1, "places_1": 1, "places_2": 1}
THINGS = NAME + 8  # names before are people


def _read(tokens):
    """A reader that knows only the format: (last value of each name, position of the first question)."""
    end = tokens.index(ASK)
    values, carriers, at = {}, {}, 0
    while at < end:
        if tokens[at] < BYTES:
            at += 1
            continue
        name, stop = tokens[at], at + 1
        assert NAME <= name < VALUE
        if NAME <= tokens[stop] < VALUE:
            carriers[name] = tokens[stop]
            at += 2
            continue
        while VALUE <= tokens[stop] < ASK:
            stop += 1
        values[name] = tokens[at + 1 : stop]
        at = stop
    return values | {thing: values[person] for thing, person in carriers.items()}, end


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", TASKS)
def test_every_answer_follows_from_the_text(name, split):
    tokens, labels = TASKS[name].sequences(40, 128, 3, split)
    assert tokens.shape == labels.shape == (40, 128)
    assert tokens.dtype == labels.dtype == np.int32
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB_SIZE
    questions = set()
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        known, at = _read(row)
        assert label[:at] == [IGNORE] * at
        size, asked = SIZES[name], []
        while at < 128:
            assert row[at] == ASK
            assert label[at] == IGNORE
            answer = label[at + 1 : at + 1 + size]
            assert answer == known[row[at + 1]]
            assert row[at + 2 : at + 1 + size] == answer[:-1]
            assert (row[at + 1] >= THINGS) or name != "places_2"
            asked.append(row[at + 1])
            at += 1 + size
        assert len(set(asked)) == len(asked)
        questions.add(len(asked))
    assert max(questions) == (1 if split == "test" else 4 if name.startswith("places") else 8)


def test_places_are_the_last_of_several():
    tokens, _ = TASKS["places_1"].sequences(40, 128, 0, "test")
    moves = [sum(1 for x, y in itertools.pairwise(row) if NAME <= x < VALUE <= y < ASK) for row in tokens]
    assert set(moves) == {8}
    assert len({x for row in tokens.tolist() for x in row if NAME <= x < VALUE}) == 8  # people only


def test_guesses_of_a_reader_who_ignores_the_name():
    found = {name: list(task.guesses().values()) for name, task in TASKS.items()}
    assert found["niah_1"] == found["niah_2"] == [1 / 32, 1, 1]
    assert found["niah_3"] == [1 / (32 * 31 * 30 * 29), 1, 1]
    equal = 1 / 8 + 7 / 8 / 32  # one of eight, or another with the same value
    assert found["multi_key"] == pytest.approx([1 / 32, equal, equal], abs=0.05)
    assert found["places_1"][2] > found["places_1"][1] + 0.1
    assert TASKS["niah_1"].chance() == 1 / 32
    assert TASKS["places_2"].chance() == found["places_2"][2]


def test_sequences_depend_on_seed_and_split_and_needles_are_anywhere():
    task = TASKS["niah_2"]
    tokens, labels = task.sequences(40, 256, 3)
    again = task.sequences(40, 256, 3)
    np.testing.assert_array_equal(tokens, again[0])
    np.testing.assert_array_equal(labels, again[1])
    assert (tokens != task.sequences(40, 256, 4)[0]).any()
    assert (tokens != task.sequences(40, 256, 3, "test")[0]).any()
    places = [int(np.argmax(row >= BYTES)) for row in task.sequences(200, 256, 0, "test")[0]]
    assert min(places) < 25
    assert max(places) > 225


def test_haystacks_are_noise_or_text_of_their_split():
    plain = lambda name, split: [
        "".join(map(chr, row[row < BYTES])) for row in TASKS[name].sequences(9, 256, 0, split)[0]
    ]
    assert all("The grass is green." in text for text in plain("niah_1", "test"))
    assert not any("The grass is green." in text for text in plain("niah_2", "test"))
    assert not set(plain("niah_2", "train")) & set(plain("niah_2", "test"))


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match=r"needles: length must be at least \d+ for these facts, got 20"):
        TASKS["multi_key"].sequences(1, 20, 0)
    with pytest.raises(ValueError, match="needles: lengths must increase"):
        run.Recipe(lengths=[256, 128])


def test_training_has_an_equal_share_of_each_task():
    recipe = run.Recipe(steps=3, batch_size=6)
    (sequences,), part, rows = recipe.training(0)
    assert not part.any()
    assert rows.shape == (3, 6)
    tokens, labels = (array[rows.ravel()] for array in sequences)
    assert tokens.shape == labels.shape == (18, 128)
    own = np.concatenate([task.sequences(3, 128, 0)[0] for task in TASKS.values()])
    np.testing.assert_array_equal(np.unique(tokens, axis=0), np.unique(own, axis=0))
    tests = recipe.tests(0)
    assert {n: part[0].shape for n, part in tests.items()} == {n: (6 * 50, n) for n in recipe.lengths}


def test_an_answer_counts_only_if_all_of_it_is_right():
    labels = jnp.full((12, 3), IGNORE).at[:, 1:].set(2)
    told = jnp.full((12, 3), 2).at[0, 2].set(1).at[3, 0].set(0)
    scores = run.answered(jax.nn.one_hot(told, 4), labels)
    np.testing.assert_allclose(scores, [0.5, 1, 1, 1, 1, 1])


@pytest.fixture(scope="module")
def omega():
    """(config, params, tokens, how the trained model's γ of the ages from `first` on are turned off)."""
    config = model("omega", 16, VOCAB_SIZE)
    params = jax.jit(language_model(config).init)(jax.random.key(0))
    tokens = jnp.asarray(TASKS["niah_2"].sequences(1, 128, 0)[0][:, -40:])

    def without(params, first):
        def off(path, x):
            keys = [getattr(key, "key", None) for key in path]
            return x.at[..., x.shape[-1] - 4 + first :].set(-1e9) if keys[-2:] == ["gates", "bias"] else x

        return jax.tree_util.tree_map_with_path(off, params)

    return config, params, tokens, without


def test_the_last_channels_of_the_gates_are_the_window(omega):
    config = omega[0]
    assert list(config.memory.build().gate_channels(16, 16))[-1] == "window_weights"


def test_a_shorter_window_is_one_whose_older_tokens_weigh_nothing(omega):
    config, params, tokens, without = omega
    shorter = jax.jit(Variant("window", 2).network(config).logits)(params, tokens)
    trained = jax.jit(language_model(config).logits)
    np.testing.assert_allclose(shorter, trained(without(params, 2), tokens), rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(shorter - trained(params, tokens)).max()) > 1e-4


def test_a_longer_window_repeats_the_weight_of_the_oldest_token(omega):
    config, params, tokens, without = omega
    longer = jax.jit(Variant("window", 8).network(config).logits)
    trained = jax.jit(language_model(config).logits)
    # Where the oldest token weighs nothing, so do all that a longer window adds.
    np.testing.assert_allclose(
        longer(without(params, 3), tokens), trained(without(params, 3), tokens), rtol=1e-5, atol=1e-5
    )
    assert float(jnp.abs(longer(params, tokens) - trained(params, tokens)).max()) > 1e-4


def test_variants_are_other_values_of_what_a_model_has():
    found = {name: [(v.setting, v.value) for v in variants(model(name, 32, VOCAB_SIZE))] for name in MODELS}
    windows = [("window", c) for c in (2, 8, 16)]
    assert found["omeganet"] == found["omega"] == windows
    assert found["atlas"] == windows + [("newton_schulz_steps", n) for n in (1, 2, 3, 7)]
    assert found["attention"] == found["titans"] == found["omega-online"] == []


def test_other_steps_of_muon_keep_the_parameters_and_the_step_size():
    config = model("atlas", 32, VOCAB_SIZE)
    tested = Variant("newton_schulz_steps", 2).config(config)
    assert tested.memory.build().optimizer.steps == 2
    shapes = [
        jax.tree.map(lambda x: x.shape, jax.eval_shape(language_model(c).init, jax.random.key(0)))
        for c in (config, tested)
    ]
    assert shapes[0] == shapes[1]
    longer = Variant("window", 16).config(config)
    assert longer.memory.max_step == tested.memory.max_step


def _row(name, seed, score, rate=0.01, variants=()):
    recipe = run.dataclasses.asdict(run.Recipe(lengths=[128, 256]))
    scores = {task: {"128": score, "256": score - 0.1} for task in TASKS}
    return {
        "model": name, "seed": seed, "learning_rate": rate, "loss": 1.0, "accuracy": score - 0.05, "scores": scores,
        "variants": list(variants), "seconds_of_all": 3.0, "parameters": 1, "state_floats": {"128": 2, "256": 3},
        "recipe": recipe,
    }  # fmt: skip


def test_the_table_has_published_orders_and_test_time_changes():
    tested = lambda x: [{"setting": "window", "value": 8, "scores": {task: {"128": x} for task in TASKS}}]
    rows = [_row("titans", seed, 0.5 + 0.01 * seed) for seed in range(3)]
    rows += [_row("titans", seed, 0.2, rate=0.001) for seed in range(3)]
    rows += [_row("delta", seed, 0.4 + 0.01 * seed, variants=tested(0.45 + 0.01 * seed)) for seed in range(3)]
    assert accuracy(rows[0], "niah_1", [256]) == pytest.approx(0.4)
    text = table(rows)
    assert "| titans | 1 | 3 | 46.0 (45.0 – 47.0) |" in text
    assert "| niah 2 | titans > delta | 93.4 – 20.2 | +10.0 |" in text
    assert "| delta | c = 8 | 128 | +5.0 |" in text


def test_the_evidence_pairs_seeds_at_the_best_rates(monkeypatch):
    rows = [_row(name, seed, 0.5 + 0.1 * (name == "titans")) for name in ("titans", "delta") for seed in range(3)]
    longer = [row | {"recipe": row["recipe"] | {"steps": 6000}} for row in rows]
    monkeypatch.setattr(sources, "rows", lambda path: tuple(longer if "long" in path else rows))
    found = sources.needles([("titans", "delta"), ("titans", "atlas")])
    assert [line.comparison.effect for line in found] == pytest.approx([0.1, 0.1])
    assert [line.tokens for line in found] == [1500 * 16 * 128, 6000 * 16 * 128]
    assert [line.setting.split(", ")[-1] for line in found] == ["1,500 steps", "6,000 steps"]


def test_published_models_and_tasks_are_known():
    for published in PUBLISHED.values():
        assert set(published) <= set(MODELS)
        assert all(set(numbers) <= set(TASKS) for numbers in published.values())
    assert PUBLISHED["ATLAS, Table 3"]["delta"] == {"niah_1": 91.4, "niah_2": 20.2, "niah_3": 22.6}


def test_rows_are_kept_and_resumed(tmp_path, monkeypatch, capsys):
    options = ["--models", "attention", "--steps", "2", "--batch-size", "4", "--seeds", "1", "--width", "16"]
    options += ["--test-sequences", "2", "--lengths", "160", "--out", str(tmp_path), "--rates"]
    run.main([*options, "1e-3"])
    (row,) = map(json.loads, (tmp_path / "small.jsonl").read_text().splitlines())
    assert (row["model"], row["seed"], row["learning_rate"]) == ("attention", 0, 1e-3)
    assert {task: list(by) for task, by in row["scores"].items()} == {task: ["160"] for task in TASKS}
    assert (tmp_path / "small.png").stat().st_size > 10_000
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("measured again"))
    run.main([*options, "1e-3"])
    assert "| attention |" in capsys.readouterr().out
