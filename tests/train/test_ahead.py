"""The programs of a run are compiled once each, ahead of their calls."""

import pytest

from atlasjax.train import train
from tests.train.tiny import config

pytestmark = pytest.mark.usefixtures("compile_fast")
# The seed as an array and as a key, the first state, the step, the evaluation, the checksums.
PROGRAMS = 6


@pytest.mark.parametrize("packing", ["contiguous", "documents"])
def test_a_run_compiles_each_program_once(packing, tmp_path, compiled):
    """Were a shape or a sharding another one than that of the call, the call would compile the program again."""
    changes = {"packing": packing, "max_segments": 3} if packing == "documents" else {}
    train(config(tmp_path, data_changes=changes, steps=1))
    assert len(compiled) <= PROGRAMS


def test_an_error_of_a_thread_is_that_of_the_call(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("cannot be traced")

    monkeypatch.setattr("atlasjax.train.step.loss_sums", fails)
    monkeypatch.setattr("atlasjax.train.step._observed_sums", fails)
    with pytest.raises(RuntimeError, match="cannot be traced"):
        train(config(tmp_path, steps=1))
