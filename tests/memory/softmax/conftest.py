"""Several blocks, and several chunks in one, at lengths that the reference can take."""

import pytest

from atlasjax.memory.softmax import engine, loop


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(engine, "_BLOCK_TOKENS", 8)
    monkeypatch.setattr(loop, "_PHASES", 2)
