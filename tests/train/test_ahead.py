"""The programs of a run are compiled once each, ahead of their calls."""

import jax
import pytest

from atlasjax.cli.report import begin_sample, sample_text
from atlasjax.train import train
from atlasjax.train.state import merge
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


def test_the_sample_of_a_report_is_compiled_meanwhile(tmp_path):
    """And not again by the report."""
    names = []
    note = lambda event, seconds, **more: names.append(more.get("fun_name")) if "backend_compile" in event else None
    sample = lambda setup: {"tokenizer": setup.tokenizer, "prompt": "In the", "seed": 3}

    def meanwhile(setup, compiling):
        waits = []
        model = merge(setup.graphdef, setup.abstract_state().params)
        begin_sample(lambda *given, **more: waits.append(compiling.begin(*given, **more)), model, **sample(setup))
        waits[0]()

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        result = train(config(tmp_path, steps=1), meanwhile=meanwhile)
        assert names.count("jit(_continued)") == 1
        model = merge(result.setup.graphdef, result.state.params)
        assert sample_text(model, **sample(result.setup)).startswith("In the")
        assert names.count("jit(_continued)") == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_an_error_of_a_thread_is_that_of_the_call(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("cannot be traced")

    monkeypatch.setattr("atlasjax.train.step.loss_sums", fails)
    monkeypatch.setattr("atlasjax.train.step._observed_sums", fails)
    with pytest.raises(RuntimeError, match="cannot be traced"):
        train(config(tmp_path, steps=1))
