"""Which tests run when: the list names what is there, and a tier that is asked for brings the lower ones."""

import ast
import pathlib

import pytest

from tests import choose_tier, tiers

ROOT = pathlib.Path(__file__).parent.parent
LINES = [line.partition("#")[0].strip().removeprefix("!") for line in tiers.LIST.read_text().splitlines()]


def test_every_line_names_tests():
    """A test that was renamed or deleted is so too in the list."""
    names = {}
    for line in filter(None, LINES):
        path, *inside = line.partition("[")[0].split("::")
        if path not in names:
            tree = ast.parse((ROOT / path).read_text())
            names[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert names[path].issuperset(inside), f"{line}: there is no such test"


@pytest.mark.parametrize(
    ("expression", "out"),
    [
        ("", {"slow", "full"}),
        ("full or not full", {"slow"}),
        ("full", {"slow"}),
        ("slow", set()),
        ("slow or not slow", set()),
    ],
)
def test_a_tier_that_is_named_brings_the_lower_ones(expression, out):
    assert tiers.left_out(expression) == out


def test_the_last_line_that_matches_decides(monkeypatch):
    text = "tests/a/\ntests/b.py::test_x  # 1.0 s\n!tests/b.py::test_x[2-*]\ntests/c.py"
    monkeypatch.setattr(tiers, "LIST", type("File", (), {"read_text": lambda: text}))
    tiers.patterns.cache_clear()
    try:
        full = ["tests/a/b.py::test_y", "tests/b.py::test_x[1]", "tests/c.py::test_x", "tests/b.py::test_x[12-3]"]
        default = ["tests/b.py::test_x[2-3]", "tests/b.py::test_xy", "tests/b.py::test_y", "tests/c.pyi::test_x"]
        assert [tiers.is_full(test) for test in full + default] == [True] * 4 + [False] * 4
    finally:
        tiers.patterns.cache_clear()


def test_the_choice(monkeypatch, capsys):
    """What is cheap stays; then what adds most per second; a test with several cases keeps the others on the list."""
    monkeypatch.setattr(choose_tier, "BUDGET", 4)
    cost = {
        "f.py::test_a": 0.1,
        "f.py::test_b[1]": 3.0,
        "f.py::test_b[2]": 3.0,
        "f.py::test_b[3]": 3.0,
        "g.py::test_c": 9.0,
    }
    ran = {"": set(), "f.py::test_a": {(1, 1)}, "f.py::test_b[1]": {(1, 1)}, "f.py::test_b[2]": {(1, 2), (1, 2, "f")}}
    ran |= {"f.py::test_b[3]": {(1, 2)}, "g.py::test_c": {(1, 9, "g")}}
    kept = choose_tier.choose(cost, ran)
    assert kept == {"f.py::test_a", "f.py::test_b[2]"}
    assert "only the full tier calls g" in capsys.readouterr().err
    assert list(choose_tier.lines(cost, kept)) == [
        "f.py::test_b[1]  # 3.0 s",
        "f.py::test_b[3]  # 3.0 s",
        "g.py  # 9.0 s",
    ]
