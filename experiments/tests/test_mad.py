"""experiments/mad: sequences are what MAD defines, every label follows from what was shown, and runs are kept and resumed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax.data.associative_recall import IGNORE
from experiments.evidence import sources
from experiments.mad import run
from experiments.mad.models import MODELS, NO_MIXER, macro_accuracy, model, network
from experiments.mad.report import PUBLISHED, chosen, orders, table
from experiments.mad.tasks import TASKS

RECALL = ("in_context_recall", "noisy_recall", "fuzzy_recall")


@pytest.mark.parametrize("name", TASKS)
def test_shapes_ranges_and_determinism(name):
    task = TASKS[name]
    tokens, labels = task.sequences(40, 3)
    assert tokens.shape == labels.shape == (40, task.time)
    assert tokens.dtype == labels.dtype == np.int32
    assert tokens.min() >= 0
    assert tokens.max() < task.vocab_size
    asked = labels[labels != IGNORE]
    assert asked.min() >= 0
    assert asked.max() < task.vocab_size
    again = task.sequences(40, 3)
    np.testing.assert_array_equal(tokens, again[0])
    np.testing.assert_array_equal(labels, again[1])
    assert (task.sequences(40, 4)[0] != tokens).any()
    assert (task.sequences(40, 3, "test")[0] != tokens).any()


def test_the_published_sizes():
    sizes = {name: (task.vocab_size, task.length, task.train_sequences) for name, task in TASKS.items()}
    assert sizes == {
        "memorization": (256, 32, 256),
        "compression": (16, 32, 12_800),
        "in_context_recall": (16, 128, 12_800),
        "noisy_recall": (32, 128, 12_800),
        "fuzzy_recall": (16, 128, 12_800),
        "selective_copying": (16, 256, 12_800),
    }


@pytest.mark.parametrize("name", RECALL)
def test_training_on_recall_predicts_every_next_token(name):
    tokens, labels = TASKS[name].sequences(20, 0)
    np.testing.assert_array_equal(labels[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("name", ["in_context_recall", "noisy_recall"])
def test_recall_asks_for_values_that_were_shown(name):
    task = TASKS[name]
    tokens, labels = task.sequences(60, 0, "test")
    values = range(8, 16)
    noisy_pairs = 0
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        seen: dict[int, int] = {}
        for at in range(0, task.time, 2):
            key, known = row[at], row[at] in seen
            value = row[at + 1] if at + 1 < task.time else label[at]  # the last pair's value is only a label
            if key >= 16:  # noise
                assert value >= 16
                assert label[at] == IGNORE
                noisy_pairs += 1
            else:
                assert key < 8
                assert value in values
                assert label[at] == (seen[key] if known else IGNORE)
                assert seen.setdefault(key, value) == value
            if at + 1 < task.time:
                assert label[at + 1] == IGNORE
        assert label[-1] != IGNORE
    share = noisy_pairs / (60 * 64)
    assert share == 0 if task.noise == 0 else abs(share - 0.2) < 0.03


def test_fuzzy_recall_asks_for_every_token_of_values_that_were_shown():
    task = TASKS["fuzzy_recall"]
    tokens, labels = task.sequences(60, 0, "test")
    sizes = set()
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        row, label = [*row, label[-1]], [IGNORE, *label]  # the label of a token now stands at the token
        seen: dict[tuple[int, ...], tuple[int, ...]] = {}
        at = next(i for i, token in enumerate(row) if token != 15)
        while at < len(row):
            key = tuple(row[at : at + 3])
            end = at + 3
            while end < len(row) and 7 <= row[end] < 15:
                end += 1
            value = tuple(row[at + 3 : end])
            assert set(key) <= set(range(7))
            assert len(set(key)) == 3
            assert 1 <= len(value) == len(set(value)) <= 3
            assert seen.get(key, value) == value
            assert label[at : at + 3] == [IGNORE] * 3
            assert tuple(label[at + 3 : end]) == (value if key in seen else (IGNORE,) * len(value))
            last_was_seen = key in seen
            seen[key] = value
            sizes.add(len(value))
            at = end
        assert last_was_seen
    assert sizes == {1, 2, 3}


def test_fuzzy_keys_of_training_have_one_to_three_tokens():
    tokens, _ = TASKS["fuzzy_recall"].sequences(30, 0)
    runs: set[int] = set()
    for row in tokens.tolist():
        kinds = "".join("k" if token < 7 else "v" if token < 15 else "p" for token in row).lstrip("p")
        assert "p" not in kinds
        runs |= {len(part) for part in kinds.split("v") if part}
    assert runs == {1, 2, 3}


def test_selective_copying_repeats_the_tokens_in_order():
    tokens, labels = TASKS["selective_copying"].sequences(50, 0)
    for row, label in zip(tokens, labels, strict=True):
        assert row[239] == 15
        assert (row[240:] == 14).all()
        np.testing.assert_array_equal(row[:239][row[:239] != 14], label[240:])
        assert (label[:240] == IGNORE).all()
        assert row[238] < 14  # blanks are inserted before tokens


def test_compression_asks_for_all_tokens_and_memorization_for_one_mapping():
    tokens, labels = TASKS["compression"].sequences(50, 0)
    np.testing.assert_array_equal(tokens, labels)
    assert (tokens[:, -1] == 15).all()
    assert set(np.unique(tokens[:, :-1])) == set(range(15))
    pairs = set()
    for split in ("train", "test"):
        tokens, labels = TASKS["memorization"].sequences(256, 0, split)
        assert (tokens[:, 1::2] == 255).all()
        assert (labels[:, ::2] == IGNORE).all()
        pairs |= set(zip(tokens[:, ::2].ravel().tolist(), labels[:, 1::2].ravel().tolist(), strict=True))
    assert {key for key, _ in pairs} == set(range(127))
    assert len(pairs) == 127  # a function, the same in training and test
    assert len({value for _, value in pairs} & set(range(127, 255))) == 127  # one to one
    other = TASKS["memorization"].sequences(256, 1)
    assert not set(zip(other[0][:, ::2].ravel().tolist(), other[1][:, 1::2].ravel().tolist(), strict=True)) <= pairs


def test_training_sequences_repeat_after_their_number():
    (sequences,), _, rows = run.Work(TASKS["memorization"], run.Recipe(steps=20, batch_size=32)).training(0)
    tokens, labels = (array[rows.ravel()] for array in sequences)
    assert tokens.shape == labels.shape == (640, 32)
    assert len(np.unique(tokens, axis=0)) == 256
    np.testing.assert_array_equal(np.sort(tokens[:256], axis=None), np.sort(tokens[256:512], axis=None))
    steps = {name: run.Work(task, run.SIZES["paper"]).steps for name, task in TASKS.items()}
    assert steps.pop("memorization") == 400
    assert set(steps.values()) == {20_000}


def test_macro_accuracy_is_the_mean_over_tokens():
    labels = jnp.array([[0, 0, 0, 1, IGNORE]])
    told = jnp.array([[0, 0, 2, 1, 3]])
    # Token 0: 2 of 3; 1: 1 of 1; 2 was told but never a label: 0. Token 3 only where nothing is asked.
    assert float(macro_accuracy(jax.nn.one_hot(told, 4), labels)) == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_the_autoencoder_decodes_from_the_last_position_alone():
    net = network(model("linear", 16, 16, convolutions=True), 6, decodes_last=True)
    params = net.init(jax.random.key(0))
    tokens = jnp.array([[1, 2, 3, 4, 5, 15]])

    def first(params):
        logits = net.logits(params, tokens)
        return logits[0, 0, 3], logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(first, has_aux=True))(params)
    assert logits.shape == (1, 6, 16)
    size = jnp.abs(gradient["model"]["embedding"]).sum(1)
    assert (size[tokens[0]] > 0).all()  # the first output depends on all tokens
    assert size[6] == 0  # and on no other
    assert float(jnp.abs(logits[:, 1:] - logits[:, :-1]).max()) > 0.01  # outputs differ by their position
    decoder = {**params["decoder"], "kernels": [jnp.zeros((16, 16))] * 2}
    flat = jax.jit(net.logits)({**params, "decoder": decoder}, tokens)
    np.testing.assert_allclose(
        flat, jnp.broadcast_to(flat[:, :1], flat.shape), atol=1e-6
    )  # which only the decoder reads


@pytest.mark.parametrize("name", [name for name in MODELS if name != NO_MIXER])
def test_models_in_both_layouts(name):
    small, plain = (model(name, 32, 16, convolutions=flag) for flag in (True, False))
    assert (small.num_layers, plain.num_layers) == (4, 2)
    assert plain.pattern == small.pattern[1::2]
    assert small.num_layers * small.mlp_dim == plain.num_layers * plain.mlp_dim
    assert small.ffn == plain.ffn == "swiglu"


def test_the_model_without_a_mixer_has_convolutions_and_as_much_swiglu():
    alone, other = (model(name, 32, 16, convolutions=True) for name in (NO_MIXER, "attention"))
    assert set(alone.pattern) == {"gam"}
    assert alone.gam.fusion == "local"
    assert alone.num_layers * alone.mlp_dim == other.num_layers * other.mlp_dim
    assert alone == model(NO_MIXER, 32, 16, convolutions=False)


def _row(task, name, seed, rate, accuracy):
    return {
        "task": task, "model": name, "seed": seed, "learning_rate": rate, "weight_decay": 0.1, "accuracy": accuracy,
        "parameters": 1, "state_floats": 2, "seconds_of_all": 3.0, "recipe": run.dataclasses.asdict(run.Recipe()),
    }  # fmt: skip


def test_orders_are_paired_at_the_best_rates():
    rows = [_row("memorization", "atlas", seed, 0.01, x) for seed, x in enumerate((0.5, 0.6, 0.71))]
    rows += [_row("memorization", "atlas", seed, 0.1, 0.1) for seed in range(3)]
    rows += [_row("memorization", "attention", seed, 0.01, x) for seed, x in enumerate((0.7, 0.8, 0.9))]
    rows += [_row("in_context_recall", name, 0, 0.01, 1.0) for name in ("atlas", "attention")]
    assert [row["accuracy"] for row in chosen(rows)["memorization", "atlas"]] == [0.5, 0.6, 0.71]
    (order,) = orders(rows, "ATLAS, Table 4")  # in-context recall has equal numbers, so no order
    assert (order.better, order.worse, order.published) == ("atlas", "attention", (91.4, 83.8))
    assert order.comparison.differences == pytest.approx((-0.2, -0.2, -0.19))
    assert order.comparison.verdict == "refuted here"
    assert "| memorization | atlas > attention | 91.4 – 83.8 | -19.7 |" in table(rows)


def test_orders_at_chance_have_no_verdict():
    rows = [
        _row("compression", name, seed, 0.01, accuracy + seed / 1000)
        for name, accuracy in (("atlas", 0.1), ("attention", 0.2), ("titans", 0.12))
        for seed in range(3)
    ]
    verdicts = lambda rows: {order.worse: order.verdict for order in orders(rows, "ATLAS, Table 4")}
    assert verdicts(rows) == {"attention": "refuted here", "titans": "refuted here"}
    rows += [_row("compression", NO_MIXER, seed, 0.01, 0.15) for seed in range(3)]
    assert verdicts(rows) == {"attention": "refuted here", "titans": "at chance"}
    assert "| atlas > titans | 51.6 – 49.6 | -2.0 | -2.0 to -2.0 | -2.0 to -2.0 | 3 | at chance |" in table(rows)
    assert "| chance |  |  | 6.2 |  |" in table(rows)


def test_the_evidence_has_what_atlas_beats(monkeypatch):
    rows = [
        _row("compression", name, seed, 0.01, 0.5 + 0.1 * (name == "atlas")) for name in MODELS for seed in range(3)
    ]
    monkeypatch.setattr(sources, "rows", lambda path: tuple(rows))
    lines = sources.mad()
    assert [line.setting.split(":")[0] for line in lines] == [
        f"atlas against {name}" for name in ("attention", "gated_delta", "titans", "omeganet")
    ]
    assert {line.tokens for line in lines} == {400 * 32 * 32}
    assert all(line.comparison.effect == pytest.approx(0.1) for line in lines)


def test_published_models_and_tasks_are_known():
    for models in PUBLISHED.values():
        assert set(models) <= set(MODELS)
        assert all(set(numbers) <= set(TASKS) for numbers in models.values())


def test_rows_are_kept_and_resumed(tmp_path, monkeypatch, capsys):
    options = ["--models", "attention", "--tasks", "compression", "--steps", "2", "--batch-size", "4", "--seeds", "1"]
    options += ["--test-sequences", "50", "--out", str(tmp_path), "--rates"]
    run.main([*options, "1e-3"])
    (row,) = map(json.loads, (tmp_path / "small.jsonl").read_text().splitlines())
    assert (row["task"], row["model"], row["seed"], row["learning_rate"]) == ("compression", "attention", 0, 1e-3)
    assert 0 <= row["accuracy"] <= 1
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("measured again"))
    run.main([*options, "1e-3"])
    assert "| attention |" in capsys.readouterr().out
