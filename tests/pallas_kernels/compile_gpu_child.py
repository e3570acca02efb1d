"""`python compile_gpu_child.py [GPU] [CASE]`: compiles every GPU kernel, forward and backward, for a GPU that need not exist.

The GPU is a name in `cuda.TARGETS`, h200 by default. A line for each: `case / kernel: R registers, S bytes spilled, M bytes shared,
N threads`, or `case / refused: the reason`. A process of its own, because XLA reads
its flags once, and because a compiler that fails a check ends the process. CASE: only cases whose names begin with it.
With "lowered" in the place of a GPU, kernels are lowered to Triton's language and not compiled, which needs none of CUDA: a line
`case / lowered` for each.
"""

import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import gpu_static  # before jax

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip

from atlasjax.memory import objectives, structures
from atlasjax.memory.bounds import LimitedSlope
from pallas_kernels.arguments import Segments
from pallas_kernels.chunk_memory import chunk_memory
from pallas_kernels.delta_rule import delta_rule
from pallas_kernels.linear_rule import memory_pass
from pallas_kernels.newton_schulz import SCHEDULES, coefficients, newton_schulz


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
    omega = functools.partial(chunk_memories, structures.MLP(), 64, 4, "bfloat16", "retention")
    yield "chunk_memory mlp 64", *omega()
    yield "chunk_memory mlp 64 of bounded norms and slopes", *omega(norm_bound=1024.0)
    yield "chunk_memory mlp 64 packed", *omega(packed=True, norm_bound=1024.0)
    titans = functools.partial(chunk_memories, structures.MLP(), 64, 1, "bfloat16", "retention", "momentum_decay")
    yield "chunk_memory mlp 64 of bounded steps", *titans(norm_bound=1024.0, step_bound=1.0, horizon=64.0)
    yield "chunk_memory mlp 64 of bounded steps, window", *omega(norm_bound=1024.0, step_bound=1.0)
    huber = functools.partial(chunk_memories, structures.Matrix(), 64, 1, "bfloat16", "retention", "threshold")
    yield "chunk_memory matrix 64 huber", *huber(loss=objectives.Huber(), norm_bound=1024.0, step_bound=1.0)
    muon = {"newton_schulz": coefficients(SCHEDULES["standard"], 5), "every": 8}
    both = ("retention", "momentum_decay")
    yield "chunk_memory muon 64", *chunk_memories(structures.MLP(), 64, 4, "bfloat16", *both, **muon)
    yield "chunk_memory matrix 32", *chunk_memories(structures.Matrix(), 32, 1, "float32", *both)
    for dim, dtype, gates in ((64, "bfloat16", 1), (128, "bfloat16", 2), (96, "float32", 2)):
        tokens = [jax.ShapeDtypeStruct((2, 256, 4, dim), dtype)] * 3
        tokens += [jax.ShapeDtypeStruct((2, 256, 4), "float32")] * gates
        call = lambda arrays: delta_rule(*arrays, implementation="pallas_gpu")[0]
        yield f"delta_rule {dim}" + " gated" * (gates > 1), call, [tokens]

        if gates > 1:
            start = jax.ShapeDtypeStruct((4, dim, dim), "float32")
            packed = segments(start, 256)
            call = lambda arrays, packed: delta_rule(*arrays, segments=packed, implementation="pallas_gpu")[0]
            yield f"delta_rule {dim} packed", call, [tokens, packed]

    for dim, dtype, channels in ((64, "bfloat16", True), (128, "bfloat16", True), (96, "float32", False)):
        yield f"memory_pass {dim}", *memory_passes(dim, dtype, channels)


def memory_passes(dim, dtype, channels):
    """The memory pass of a linear rule, with all that it may have; decays for each channel or for each head."""
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct((8, 2, *shape), dtype)  # 8 chunks of 2 sequences
    tokens = [array(4, 32, dim, dtype=dtype)] * 3
    states = [array(4, dim, dim), array(4, *[dim] * channels)]
    memories = [jax.ShapeDtypeStruct((2, 4, dim, dim), "float32"), jax.ShapeDtypeStruct((4, dim, dim), "float32")]
    return lambda *arrays: memory_pass(*arrays)[1], [*tokens, *states, *memories, array(dtype="bool")]


def segments(start, time):
    """Packed segments in chunks of 64, from an initial memory."""
    marks = jax.ShapeDtypeStruct((2, time // 64), "int32")
    return Segments(marks, start, jax.ShapeDtypeStruct((2, time), "float32"))


def chunk_memories(structure, dim, window, dtype, *gates, packed=False, loss=objectives.L2(), **options):
    """A chunk memory with some gates, and the shapes of its arguments."""
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct((2, *shape), dtype)
    weights = {name: array(4, *shape) for name, shape in structure.weight_shapes(dim, dim).items()}
    momenta = weights if "momentum_decay" in gates else None
    tokens = [array(256, 4, dim, dtype=dtype)] * 3
    values = {name: array(256, 4) for name in ("step_size", *gates)}
    if window > 1:
        values["window_weights"] = array(256, 4, window)

    start = {
        name: jax.ShapeDtypeStruct((4, *shape), "float32") for name, shape in structure.weight_shapes(dim, dim).items()
    }
    restarts = [segments(start, 256)] * packed

    def call(weights, momenta, q, k, v, gates, *restarts):
        if restarts:
            gates = gates | {"segments": restarts[0]}
        given = {"chunk_size": 64, "implementation": "pallas_gpu", **gates, **options}
        objective = LimitedSlope(loss, 1024.0) if "norm_bound" in options else loss
        return chunk_memory(structure, objective, weights, momenta, q, k, v, **given)[0]

    return call, [weights, momenta, *tokens, values, *restarts]


def main(gpu="h200", only=""):
    for case, function, shapes in kernels():
        if not case.startswith(only):
            continue
        loss = lambda *arrays, function=function: jnp.sum(function(*arrays).astype(jnp.float32) ** 2)
        try:
            if gpu == "lowered":
                jax.jit(jax.value_and_grad(loss)).trace(*shapes).lower(lowering_platforms=("cuda",))
                print(f"{case} / lowered", flush=True)
                continue
            program = gpu_static.compiled(jax.value_and_grad(loss), shapes, gpu)
        except Exception as error:
            print(f"{case} / refused: {str(error).splitlines()[0]}", flush=True)
            continue
        for kernel in gpu_static.kernels(program, gpu):
            name, registers, spilled, shared, threads = kernel
            print(
                f"{case} / {name}: {registers} registers, {spilled} bytes spilled, {shared} bytes shared, "
                f"{threads} threads",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
