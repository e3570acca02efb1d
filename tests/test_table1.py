"""The table of rules: complete, read from the rules, and the same in the documentation."""

import dataclasses
import pathlib

import pytest

from atlasjax import rules, table1
from atlasjax.memory import retention, structures

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "rules.md"


def test_every_rule_has_a_row():
    assert set(rules.WRITES) == set(rules.REGISTRY)
    for name in rules.REGISTRY:
        assert all(isinstance(value, str) and value for value in dataclasses.astuple(table1.row(name)))


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == table1.page(), "run: python -m atlasjax.table1 > docs/rules.md"


def test_rows_follow_the_rule_and_not_its_name():
    assert table1.row("titans").depth == "residual MLP, 2 matrices, 4×"
    assert table1.row("titans", rules.titans(structure=structures.Matrix())).depth == "matrix"
    assert table1.row("moneta", rules.moneta(q=2.0)).decay == "per head"
    assert table1.row("omeganet", rules.omeganet(window=9)).context == "last c = 9 tokens"
    changed = dataclasses.replace(rules.gla(), retention=retention.Full())
    assert table1.row("gla", changed).decay == "no"


def test_characteristics_that_the_paper_names():
    """A Table 1's own marks: who has dynamic decay, a deep memory, second order, a window."""
    marks = {
        name: (r.decay != "no", "MLP" in r.depth, "second" in r.optimality, "last c" in r.context)
        for name in rules.REGISTRY
        for r in [table1.row(name)]
    }
    assert marks["linear_attention"] == marks["delta_rule"] == (False, False, False, False)
    assert marks["gated_delta_rule"] == marks["rwkv7"] == (True, False, False, False)
    assert marks["titans"] == marks["yaad"] == marks["memora"] == marks["dla"] == (True, True, False, False)
    assert marks["omeganet"] == (True, True, False, True)
    assert marks["atlas"] == marks["atlas_plus_plus"] == (True, True, True, True)


def test_a_wrong_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="Did you mean 'omeganet'"):
        table1.row("omeganett")
