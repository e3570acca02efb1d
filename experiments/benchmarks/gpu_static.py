"""Reports of the compilers about a program's GPU kernels, without a GPU.

Import this before jax. It needs jax's CUDA plugin and ptxas (`pip install 'atlasjax[cuda-compile]'`), but no GPU and no driver.
"""

import atexit
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Must be set before anything imports jax. With "cpu" the plugin does not look for a device but still provides its compiler.
# From jax 0.11 on PTX is dumped only if an emitter is named; the passes of all of them take longer to write than to run.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TF_CPP_MIN_LOG_LEVEL="2",
    XLA_FLAGS=f"--xla_dump_emitter_re={'none' if importlib.metadata.version('jax') < '0.11' else '.*'} "
    f"--xla_dump_to={tempfile.mkdtemp()}",
)

import jax
import numpy as np
from jax.extend import core
from jax.sharding import SingleDeviceSharding

from atlasjax.plan.cuda import TARGETS
from atlasjax.plan.topology import Topology

DUMP = pathlib.Path(os.environ["XLA_FLAGS"].rpartition("=")[2])
atexit.register(shutil.rmtree, DUMP, ignore_errors=True)


class Kernel(NamedTuple):
    """A Pallas kernel: its name, registers and spilled bytes per thread, shared bytes and threads per program."""

    name: str
    registers: int
    spilled: int
    shared: int
    threads: int


def compiled(function: Callable[..., Any], shapes: Any, gpu: str = "h200") -> Any:
    """A function compiled for one GPU, a name in `cuda.TARGETS`. shapes: those of its arguments."""
    for path in DUMP.iterdir():
        path.unlink()
    return traced(function, shapes, gpu).lower().compile()


def traced(function: Callable[..., Any], shapes: Any, gpu: str = "h200") -> Any:
    """A function traced for one GPU. shapes: those of its arguments."""
    target = Topology.parse(f"{gpu}:1")
    devices = target.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(devices[0]))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).trace(*jax.tree.map(place, shapes))


def seconds_alone(function: Callable[..., Any], shapes: Any, gpu: str = "h200") -> dict[str, float]:
    """Processor seconds to compile each Pallas kernel of a function by itself, by its name."""
    found: dict[str, float] = {}
    for equation in _pallas_calls(traced(function, shapes, gpu).jaxpr.jaxpr):
        name = str(equation.params.get("name") or equation.params["name_and_src_info"]).split()[0]
        if name not in found:
            call = lambda *arrays, equation=equation: equation.primitive.bind(*arrays, **equation.params)
            alone = traced(call, [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars], gpu)
            started = processor_seconds()
            alone.lower().compile()
            found[name] = round(processor_seconds() - started, 2)
    return found


def _pallas_calls(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        is_jaxpr = lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr))
        for inner in filter(is_jaxpr, jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)):
            yield from _pallas_calls(getattr(inner, "jaxpr", inner))


def processor_seconds() -> float:
    """Of this process and of those that it has ended, such as ptxas."""
    return sum(os.times()[:4])


def kernels(program: Any, gpu: str = "h200") -> Iterator[Kernel]:
    """The Pallas kernels of the last program that `compiled` compiled, for that GPU."""
    ours = tuple(re.findall(r'"__gpu\$xla\.gpu\.triton".*? name = "([^"]+)"', program.as_text()))
    thunks = "".join(path.read_text() for path in DUMP.glob("*thunk_sequence.txt"))
    launched = re.findall(r"kCustomKernel .*?(\S+) grid: .*? threads: \[(\d+), .*? shared_memory: (\d+) bytes", thunks)
    report = ""
    for path in DUMP.glob("*.ptx"):
        if ".entry" in path.read_text():
            command = [_assembler(), "-v", f"-arch={TARGETS[gpu].architecture}", path, "-o", os.devnull]
            report += subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert len(ours) == sum(name.startswith(ours) for name, *_ in launched), (ours, launched)
    for name, threads, shared in launched:
        if not name.startswith(ours):
            continue  # an XLA fusion
        found = re.search(
            rf"Compiling entry function '{name}'.*?(\d+) bytes spill stores.*?Used (\d+) registers", report, re.DOTALL
        )
        assert found is not None, name
        yield Kernel(name, int(found[2]), int(found[1]), int(shared), int(threads))


def _assembler() -> str:
    """The path of ptxas, from the wheels or an installed toolkit."""
    found = sorted(path for root in sys.path for path in pathlib.Path(root).glob("nvidia/cu*/bin/ptxas"))
    path = str(found[0]) if found else shutil.which("ptxas")
    if path is None:
        raise FileNotFoundError("ptxas is not installed: pip install 'atlasjax[cuda-compile]'.")
    return path
