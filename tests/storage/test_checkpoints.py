"""Checkpoints in a bucket: what the store does is not taken for what is in it."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import pytest

from atlasjax import storage
from atlasjax.train import Checkpoints
from tests.storage.server import BUCKET, Fault
from tests.train.test_checkpoint import CONFIG, make_state

FOLDER = f"gs://{BUCKET}/checkpoints"


@pytest.fixture(scope="module")
def saved(server):
    """Three saves, of which two are kept: the last state."""
    with Checkpoints(FOLDER, keep=2) as checkpoints:
        for step in (1, 2, 3):
            state = dataclasses.replace(make_state(8), step=jnp.int32(step))
            checkpoints.save(state, [None], CONFIG)
    return state


def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def test_old_ones_are_deleted_and_the_newest_is_read(saved, server):
    assert {name.split("/")[1] for name in server.names("checkpoints/")} == {"2", "3"}
    with Checkpoints(FOLDER, clean=False) as checkpoints:
        restored = checkpoints.restore(abstract(saved))
    assert (restored.step, restored.skipped) == (3, [])


@pytest.mark.parametrize(
    "part", ["/checkpoints/3/params", "/checkpoints/3/config", "checkpoints/3/_CHECKPOINT_METADATA"]
)
def test_a_store_that_refuses_is_not_a_damaged_checkpoint(saved, server, part):
    """It would be set aside, and its steps be taken again."""
    refused = Fault(lambda method, path: part in path, status=403)
    with server.faulty(refused), pytest.raises(storage.StoreError) as caught, Checkpoints(FOLDER) as checkpoints:
        checkpoints.restore(abstract(saved))
    assert refused.seen
    assert "\n" not in str(caught.value)
    assert {name.split("/")[1] for name in server.names("checkpoints/")} == {"2", "3"}


def test_a_store_that_is_away(saved, server, no_pauses):
    with (
        server.faulty(Fault(lambda method, path: True, status=503)),
        pytest.raises(storage.StoreError, match=f"{FOLDER}: the store did not answer") as caught,
    ):
        Checkpoints(FOLDER, clean=False)
    assert "\n" not in str(caught.value)


def test_what_is_an_outage():
    wrapped = ValueError("loading failed")
    wrapped.__cause__ = storage.StoreError("away")
    assert storage.is_outage(wrapped)
    assert storage.is_outage(
        ValueError("ABORTED: All 6 retry attempts failed: UNAVAILABLE: [http_response_code='503']")
    )
    assert not storage.is_outage(ValueError("DATA_LOSS: Error decoding"))
    assert not storage.is_outage(FileNotFoundError(pathlib.Path("x")))
