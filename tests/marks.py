"""Which cases of a parametrized test run by default, and which with `-m slow`."""

from collections.abc import Collection, Iterable

import pytest


def some_slow(values: Iterable, slow: Collection) -> list:
    """Parameters of a test, those in `slow` marked as such."""
    return [pytest.param(value, marks=[pytest.mark.slow] if value in slow else []) for value in values]


def if_slow(*values):
    """A case of several parameters that runs with `-m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def each_name(names: Iterable[str], slow: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrizes a test by `name`. Its argument is what docs/generate.py finds: the table that the test runs over."""
    return pytest.mark.parametrize("name", some_slow(names, slow))
