"""The memory core is tested in float64 where the question is whether two forms are the same function."""

import jax
import pytest

from atlasjax.memory import api, layerwise
from atlasjax.memory.caching import scan as caching_scan
from atlasjax.memory.caching import step as caching_step
from atlasjax.memory.fast_weights import kernels, reference, scan, step
from atlasjax.memory.large_chunk import reference as large_chunk_reference
from atlasjax.memory.large_chunk import scan as large_chunk_scan
from atlasjax.memory.large_chunk import step as large_chunk_step
from atlasjax.memory.log_linear import scan as log_linear_scan
from atlasjax.memory.log_linear import step as log_linear_step
from atlasjax.memory.softmax import scan as softmax_scan
from atlasjax.memory.softmax import step as softmax_step

TRACED = (
    scan.xla_scan, step.xla_step, reference.reference_scan, kernels.pallas_scan, softmax_scan.xla_scan,
    softmax_step.xla_step, caching_scan.xla_scan, caching_step.xla_step, log_linear_scan.xla_scan, log_linear_step.xla_step,
    large_chunk_scan.xla_scan, large_chunk_step.xla_step, large_chunk_reference.reference_scan,
    layerwise.step_layer, api._jitted_scan,
)  # fmt: skip


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def forget_traces():
    """What a module's constant was when a call was traced stays in the trace, which is kept for the next call of those shapes."""
    for function in TRACED:
        function.clear_cache()


@pytest.fixture
def monkeypatch(monkeypatch):
    """A test that patches what is read in tracing finds no trace from before, and leaves none."""
    forget_traces()
    yield monkeypatch
    forget_traces()
