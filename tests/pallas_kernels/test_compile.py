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
    assert len(lines) == 11
    for line in lines:
        name, _, rest = line.partition(": ")
        assert int(rest.split()[0]) == 2, f"{name}: forward and backward are one kernel each, got {rest}"
