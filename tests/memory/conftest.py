"""The memory core is tested in float64 where the question is whether two forms are the same function."""

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
