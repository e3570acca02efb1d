"""GPU kernels compile for GPUs that nobody here owns: interpret mode knows neither what Triton refuses nor what spills."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

CHILD = pathlib.Path(__file__).with_name("compile_gpu_child.py")
# Bytes of a thread, with CUDA 13.5. A two-layer memory's step of its cotangents has more in hand than 255 registers; where slopes
# are limited, 40 bytes more than with the derivative of `jnp.max`, which can be 0/0 (`blocks.largest_entry`). Its loops are
# compiled once. As three copies, one for each outcome of a branch inside, they spilled about 100 bytes less, and took twice as long
# to compile.
MOST_SPILLED = {
    "h200": {
        "chunk_memory mlp 64": 128,
        "chunk_memory mlp 64 of bounded norms and slopes": 316,
        "chunk_memory mlp 64 packed": 380,
        "chunk_memory mlp 64 of bounded steps": 576,
        "chunk_memory mlp 64 of bounded steps, window": 1452,
        "delta_rule 96 packed": 4,
    },
    "a100": {
        "newton_schulz 9x40 direct": 28,
        "newton_schulz 64x256 direct": 64,
        "newton_schulz 64x256 gram": 228,
        "newton_schulz 128x512 gram": 216,
        "newton_schulz 256x1024 direct": 56,
        "chunk_memory mlp 64": 552,
        "chunk_memory mlp 64 of bounded norms and slopes": 516,
        "chunk_memory mlp 64 packed": 580,
        "chunk_memory mlp 64 of bounded steps": 1524,
        "chunk_memory mlp 64 of bounded steps, window": 1988,
        "chunk_memory matrix 64 huber": 644,
        "chunk_memory muon 64": 180,
        "delta_rule 64": 1396,
        "delta_rule 128 gated": 1576,
        "delta_rule 128 packed": 1576,
    },
}
MOST_SHARED = {"h200": 227, "a100": 163}  # KiB of a block
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs CUDA's compiler, no GPU: pip install 'atlasjax[cuda-compile]'",
)
LINE = re.compile(r"(.*) / (\S+): (\d+) registers, (\d+) bytes spilled, (\d+) bytes shared, (\d+) threads")


def compiled(gpu, case=""):
    child = subprocess.run(
        [sys.executable, CHILD, gpu, case], capture_output=True, text=True, timeout=1800, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    return child.stdout.splitlines()


# Bounded steps, in the smallest kernels that have them.
@pytest.mark.parametrize("case", ["chunk_memory matrix 64 huber", pytest.param("", marks=pytest.mark.slow)])
def test_kernels_are_lowered(case):
    """Triton has no lowering of some functions that interpret mode takes, such as one with a derivative of its own."""
    lines = compiled("lowered", case)
    assert len(lines) == (1 if case else 21)
    assert [line for line in lines if not line.endswith(" / lowered")] == []


@needs_cuda
@pytest.mark.parametrize("gpu", ["h200", pytest.param("a100", marks=pytest.mark.slow)])
def test_kernels_compile(gpu):
    kernels = [LINE.fullmatch(line).groups() for line in compiled(gpu)]
    for direction in ("forward", "backward"):
        found = [case for case, name, *_ in kernels if case.startswith("newton_schulz") and direction in name]
        assert len(found) == 8
    assert sum(name.startswith("chunk_memory") for _, name, *_ in kernels) == 14
    assert sum(case.startswith("delta_rule") for case, *_ in kernels) == 30
    assert sum(case.startswith("memory_pass") for case, *_ in kernels) == 6
    for case, name, _, spilled, shared, _ in kernels:
        most = MOST_SPILLED[gpu].get(case, 0)
        assert int(spilled) <= most, (
            f"{case}, {name}: {spilled} bytes of registers spilled, at most {most} are known of"
        )
        assert int(shared) <= MOST_SHARED[gpu] * 1024, f"{case}, {name}: {shared} bytes of shared memory"


@needs_cuda
def test_a_t4_is_too_old():
    lines = compiled("t4")
    assert len(lines) == 24
    for line in lines:
        assert "refused" in line
        assert "Triton support is only enabled for" in line
        assert "compute capability 7.5" in line
