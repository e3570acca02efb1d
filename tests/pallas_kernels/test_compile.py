"""Kernels compile for TPUs that nobody here owns: interpret mode does not know what Mosaic refuses."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
CHILD = pathlib.Path(__file__).with_name("compile_child.py")


def compiled(topologies, which):
    """Its lines: every kernel that compiled."""
    command = [sys.executable, CHILD, topologies, which]
    child = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    return child.stdout.splitlines()


def check(lines):
    for line in lines:
        name, _, rest = line.partition(": ")
        # Muon's backward pass runs a chunk's forward kernel again, which keeps the carry before each of its blocks.
        expected = 3 if "muon" in name else 2
        assert int(rest.split()[0]) == expected, f"{name}: one kernel each way, got {rest}"


@needs_libtpu
def test_kernels_of_each_kind_compile_for_one_of_three():
    lines = compiled("v5e:2x2,v5p:2x2x1,v6e:2x2", "some")
    assert len(lines) == 9
    check(lines)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_kernels_compile(topology):
    lines = compiled(topology, "all")
    assert len(lines) == 20
    check(lines)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_wide_kernels_compile(topology):
    lines = compiled(topology, "wide")
    assert len(lines) == 14
    check(lines)
