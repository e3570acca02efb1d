"""`python compile_gpu_child.py`: compiles every GPU kernel, forward and backward, for an H200 that need not exist.

A line for each: `case / kernel: R registers, S bytes spilled, M bytes shared, N threads`. A process of its own, because XLA reads
its flags once, and because a compiler that fails a check ends the process.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# Must be set before anything imports jax. With "cpu" the plugin looks for no device; it still offers its compiler.
os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="2", XLA_FLAGS=f"--xla_dump_to={tempfile.mkdtemp()}")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from atlasjax.memory import objectives, structures
from pallas_kernels.chunk_memory import chunk_memory
from pallas_kernels.newton_schulz import newton_schulz

DUMP = pathlib.Path(os.environ["XLA_FLAGS"].partition("=")[2])
TARGET = pathlib.Path(__file__).with_name("h200.txtpb")


def kernels():
    """(name, function of arrays, their shapes): a function whose gradient by its first argument is compiled with it."""
    for rows, columns, options in (
        (9, 40, {"form": "direct"}),
        (32, 128, {"form": "gram"}),
        (64, 256, {"form": "direct"}),
        (64, 256, {"form": "gram"}),
        (96, 384, {"form": "gram", "steps": 7, "precision": jax.lax.Precision.DEFAULT}),
        (128, 512, {"form": "direct", "precision": jax.lax.Precision.DEFAULT}),
        (128, 512, {"form": "gram"}),
        (256, 1024, {"form": "direct"}),
    ):
        call = lambda s, options=options: newton_schulz(s, implementation="pallas_gpu", **options)
        name = f"newton_schulz {rows}x{columns} {options['form']}" + " single" * ("precision" in options)
        yield name, call, [jax.ShapeDtypeStruct((1024, rows, columns), "float32")]
    # OmegaNet's, and the smallest with all gates.
    yield "chunk_memory mlp 64", *chunk_memories(structures.MLP(), 64, 4, "bfloat16", "retention")
    yield "chunk_memory matrix 32", *chunk_memories(structures.Matrix(), 32, 1, "float32", "retention", "momentum")


def chunk_memories(structure, dim, window, dtype, *gates):
    """A chunk memory with some gates, and the shapes of its arguments."""
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct((2, *shape), dtype)
    weights = {name: array(4, *shape) for name, shape in structure.weight_shapes(dim, dim).items()}
    momenta = weights if "momentum" in gates else None
    tokens = [array(256, 4, dim, dtype=dtype)] * 3
    values = {name: array(256, 4) for name in ("step_size", *gates)}
    if window > 1:
        values["window"] = array(256, 4, window)

    def call(weights, momenta, q, k, v, gates):
        given = {"chunk_size": 64, "implementation": "pallas_gpu", **gates}
        return chunk_memory(structure, objectives.L2(), weights, momenta, q, k, v, **given)[0]

    return call, [weights, momenta, *tokens, values]


def assembler():
    """The path of ptxas, of the wheels or of an installed toolkit."""
    found = sorted(path for root in sys.path for path in pathlib.Path(root).glob("nvidia/cu*/bin/ptxas"))
    return str(found[0]) if found else shutil.which("ptxas")


def compiled(function, shapes):
    """The Pallas kernels of a compiled function: (name, registers, bytes spilled, bytes shared, threads)."""
    for path in DUMP.iterdir():
        path.unlink()
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=TARGET.read_text()
    ).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(devices[0]))
    # Where no device is attached, the mesh tells Triton's lowering which one it is.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(function).lower(*jax.tree.map(place, shapes)).compile().as_text()
    ours = tuple(re.findall(r'"__gpu\$xla\.gpu\.triton".*? name = "([^"]+)"', text))
    thunks = "".join(path.read_text() for path in DUMP.glob("*thunk_sequence.txt"))
    launched = re.findall(r"kCustomKernel .*?(\S+) grid: .*? threads: \[(\d+), .*? shared_memory: (\d+) bytes", thunks)
    report = ""
    for path in DUMP.glob("*.ptx"):
        if ".entry" in path.read_text():
            command = [assembler(), "-v", "-arch=sm_90a", path, "-o", os.devnull]
            report += subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert len(ours) == sum(name.startswith(ours) for name, *_ in launched), (ours, launched)
    for name, threads, shared in launched:
        if not name.startswith(ours):
            continue  # a fusion of XLA
        found = re.search(
            rf"Compiling entry function '{name}'.*?(\d+) bytes spill stores.*?Used (\d+) registers", report, re.DOTALL
        )
        yield name, int(found[2]), int(found[1]), int(shared), int(threads)


def main():
    for case, function, shapes in kernels():
        loss = lambda *arrays, function=function: jnp.sum(function(*arrays).astype(jnp.float32) ** 2)
        for name, registers, spilled, shared, threads in compiled(jax.value_and_grad(loss), shapes):
            print(
                f"{case} / {name}: {registers} registers, {spilled} bytes spilled, {shared} bytes shared, "
                f"{threads} threads",
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    finally:
        shutil.rmtree(DUMP, ignore_errors=True)
