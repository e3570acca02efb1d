"""What is refused, and the words of the message."""

from numbers import Integral

import numpy as np
import pytest

from atlasjax import check

NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check.integer("f", "n", 0), "f: n must be an integer ≥ 1, got 0."),
        (lambda: check.integer("f", "n", True, 0), "f: n must be an integer ≥ 0, got True."),
        (lambda: check.integer("f", "n", 2.0, optional=True), "f: n must be an integer ≥ 1 or None, got 2.0."),
        (lambda: check.integer("f", "n", np.int64(2)), f"f: n must be an integer ≥ 1, got {np.int64(2)!r}."),
        (
            lambda: check.integer("f", "n", 2**63, optional=True),
            "f: n must be an integer ≥ 1 and below 2^63 or None, got 9223372036854775808.",
        ),
        (lambda: check.number("f", "x", 0, above=0), "f: x must be a number > 0, got 0."),
        (lambda: check.number("f", "x", NAN, least=2), "f: x must be a number ≥ 2, got nan."),
        (lambda: check.number("f", "x", 1.0, above=0, below=1), "f: x must be a number in (0, 1), got 1.0."),
        (lambda: check.number("f", "x", -1, least=0, most=1), "f: x must be a number in [0, 1], got -1."),
        (lambda: check.number("f", "x", 3, most=2, optional=True), "f: x must be a number ≤ 2 or None, got 3."),
        (lambda: check.number("f", "x", 10**400), "f: x must be a number, got an integer of more than 300 digits."),
        (
            lambda: check.integer("f", "n", -(10**5000)),
            "f: n must be an integer ≥ 1, got a negative integer of more than 300 digits.",
        ),
        (lambda: check.number("f", "x", True), "f: x must be a number, got True."),
        (lambda: check.boolean("f", "b", 1), "f: b must be True or False, got 1."),
        (lambda: check.choice("f", "c", "x", ("a", "b")), "f: c must be 'a' or 'b', got 'x'."),
        (lambda: check.instance("f", "o", 1, str), "f: o must be a str, got 1."),
        (lambda: check.require(False, "steps", 0, "at least 1"), "steps is 0; it must be at least 1."),
    ],
)
def test_refused(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == words


def test_accepted():
    check.integer("f", "n", np.int64(2), kinds=Integral)
    check.integer("f", "n", None, optional=True)
    check.number("f", "x", 1, least=1, most=1)
    check.number("f", "x", None, above=0, optional=True)
    check.boolean("f", "b", False)
    check.choice("f", "c", "a", ("a", "b"))
    check.instance("f", "o", None, str, optional=True)
    check.require(True, "steps", 1, "at least 1")


@pytest.mark.parametrize("value", [np.zeros((3, 3)), "a\nb", [[0.0] * 100] * 100])
def test_a_message_is_one_short_line(value):
    for call in (
        lambda: check.integer("f", "n", value),
        lambda: check.instance("f", "n", value, dict),
        lambda: check.require(False, "n", value, "another"),
    ):
        with pytest.raises(ValueError, match="n ") as error:
            call()
        assert len(str(error.value).splitlines()) == 1
        assert len(str(error.value)) < 300
