"""A bucket for the tests of this folder, and processes that share nothing else."""

import asyncio
import os
import types

import pytest

pytest.importorskip("gcp_storage_emulator")
pytest.importorskip("gcsfs")


@pytest.fixture(scope="session")
def server():
    """The bucket. Its environment variables are read when a storage library is imported or first used."""
    from tests.storage.server import Server

    made = Server()
    before = dict(os.environ)
    os.environ.update(made.environment())
    yield made
    os.environ.clear()
    os.environ.update(before)
    made.close()


@pytest.fixture
def no_pauses(server, monkeypatch):
    """Requests are repeated at once."""
    import gcsfs.retry

    monkeypatch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(0)))
