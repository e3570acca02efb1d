"""experiments/benchmarks/memory_cpu.py."""

import inspect

from experiments.benchmarks.memory_cpu import by_xla
from pallas_kernels.chunk_scan import chunk_scan


def test_the_kernels_form_takes_what_the_kernels_pass():
    """`forms` puts `by_xla` in the place of `chunk_scan`."""
    assert inspect.signature(by_xla).parameters.keys() == inspect.signature(chunk_scan).parameters.keys()
