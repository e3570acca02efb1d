"""Which cases of a parametrized test run by default, and which with `-m slow`."""

from collections.abc import Collection, Iterable

import pytest


def some_slow(values: Iterable, slow: Collection) -> list:
    """Parameters of a test, those in `slow` marked as such."""
    return [pytest.param(value, marks=[pytest.mark.slow] if value in slow else []) for value in values]
