"""Several blocks, and several chunks in one, at lengths that the reference can take."""

import pytest

from atlasjax.memory.softmax import loop, scan


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(scan, "_BLOCK_TOKENS", 8)
    monkeypatch.setattr(loop, "_PHASES", 2)
