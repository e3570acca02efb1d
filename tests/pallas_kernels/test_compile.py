"""Kernels compile for TPUs that nobody here owns: interpret mode does not know what Mosaic refuses."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

CHILD = pathlib.Path(__file__).with_name("compile_child.py")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_kernels_compile(topology):
    child = subprocess.run([sys.executable, CHILD, topology], capture_output=True, text=True, timeout=900, check=False)
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    lines = child.stdout.splitlines()
    assert len(lines) == 12
    for line in lines:
        name, _, rest = line.partition(": ")
        # Muon's backward pass runs a chunk's forward kernel again, which keeps the carry before each of its blocks.
        expected = 3 if "muon" in name else 2
        assert int(rest.split()[0]) == expected, f"{name}: one kernel each way, got {rest}"
