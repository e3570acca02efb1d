"""experiments/scaling: each case once, one thing changes at a time, rows resume, the three views have their rows."""

import dataclasses

import pytest

from experiments.language.models import model
from experiments.scaling import report, run
from experiments.scaling.run import CONTEXTS, MODELS, WIDTHS, Case, Recipe, cases, config_of, key_of


def row(case, bits, c=None):
    return {
        **dataclasses.asdict(case), "c": c, "bits_per_byte": bits, "parameters": case.width**2, "flops": case.width**2 * 1e12,
        "seconds": 1.0, "recipe": dataclasses.asdict(Recipe()),
    }  # fmt: skip


def test_each_case_once():
    found = cases()
    assert len(found) == len(set(found)) == len(WIDTHS) * len(MODELS) + 2 * len(MODELS) + 3 * len(CONTEXTS)
    assert [case.seed for case in cases(("titans",), 2)] == [0] * 6 + [1] * 6
    with pytest.raises(ValueError, match="Did you mean 'titans'"):
        config_of(Case("titan"))


def test_one_thing_changes():
    whole = config_of(Case("omeganet"))
    assert whole == model("omeganet", 512)
    narrow = config_of(Case("omeganet", width=32))
    assert dataclasses.replace(narrow, dim=128, mlp_dim=whole.mlp_dim) == whole
    assert narrow.mlp_dim / narrow.dim == whole.mlp_dim / whole.dim
    assert config_of(Case("omeganet", window=16)).memory.build().window == 16
    assert whole.memory.build().window == 4


def test_views():
    size = [row(Case(name, width), 3 - width / 100, 4) for name in ("omeganet", "titans") for width in WIDTHS]
    context = [row(Case("titans", context=context), 2 - context / 2048) for context in (128, 2048)]
    window = [row(Case("omeganet", context=context, window=c), 2 - c / 64, c) for context in CONTEXTS for c in (1, 16)]
    rows = size + context + window
    assert {name: list(line) for name, line in report.by_size(rows).items()} == {
        "omeganet": [width**2 for width in WIDTHS], "titans": [width**2 for width in WIDTHS]
    }  # fmt: skip
    assert list(report.by_context(rows)["titans"]) == list(CONTEXTS)
    assert {context: list(line) for context, line in report.by_window(rows).items()} == {
        128: [1, 16], 512: [1, 4, 16], 2048: [1, 16]
    }  # fmt: skip


def test_rows_resume(tmp_path, monkeypatch, capsys):
    text, measured = tmp_path / "book.txt", []
    text.write_text("A whale. " * 400)

    def measure(case, recipe, texts):
        measured.append(case)
        if case == Case("titans", 64):
            raise FloatingPointError("the loss of step 3 is nan")
        return row(case, 2.0) | {"recipe": dataclasses.asdict(recipe)}

    monkeypatch.setattr(run, "measure", measure)
    options = ["--only", "titans", "--text", str(text), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="No number for: titans, width 64"):
        run.main(options)
    assert measured == cases(("titans",))
    with pytest.raises(SystemExit):
        run.main(options)
    assert measured[6:] == [Case("titans", 64)]
    assert "| titans | 2.000 | 2.000 | 2.000 |" in capsys.readouterr().out
    text.write_text("Another book. " * 400)
    with pytest.raises(SystemExit):
        run.main(options)
    assert "has rows of another recipe" in capsys.readouterr().err
    assert (tmp_path / "book.png").read_bytes().startswith(b"\x89PNG")
    assert key_of(row(Case("atlas", seed=3), 1.0)) == Case("atlas", seed=3)


@pytest.mark.full
def test_a_case_is_measured(tmp_path, monkeypatch):
    text = tmp_path / "book.txt"
    text.write_text("The whale, the white whale, a sail. " * 400)
    monkeypatch.setattr(
        run, "config_of", lambda case: dataclasses.replace(model("transformer++"), dim=8, num_layers=1, num_heads=2)
    )
    found = run.measure(Case("transformer++", context=128), Recipe(steps=2), (str(text),))
    assert (found["tokens"], found["c"]) == (2 * 2048, None)
    assert 4 < found["bits_per_byte"] < 12
    head = 2 * 256 * 8  # FLOPs of a token's logits
    assert found["flops"] > 3 * head * found["tokens"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"steps": 0}, "steps must be at least 1, got 0"), ({"tokens": 1000}, "a multiple of 2048, got 1000")],
)
def test_recipes_are_checked(changes, words):
    with pytest.raises(ValueError, match=words):
        Recipe(**changes)
