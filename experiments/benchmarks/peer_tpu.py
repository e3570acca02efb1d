"""The TPU kernels of `linear_rule` beside a peer's, by the TPU compiler's schedule: Kimi Delta Attention of tokamax. Needs no TPU.

    pip install tokamax==0.0.17                                     # Python ≥ 3.12; not a dependency of this project
    python experiments/benchmarks/peer_tpu.py                       # d = 128 on v6e: ten minutes on two cores
    python experiments/benchmarks/peer_tpu.py --topology v5e --dim 64
    python experiments/benchmarks/peer_tpu.py --only ours           # without the peer, which need not be installed

Both compute the same function of q, k, v, gates and cotangents, 16 heads and 4,096 tokens, bfloat16, compiled with the same jax and
libtpu. Each program is compiled in a child process and appended to `--out` as one line of JSON: for each kernel its bundles × grid
steps per token and head; XLA's own estimate of the cycles around them, likewise; and the MiB of temporaries. The peer is given
logarithms of decays, which it sums itself, and this project's kernel decays. Figures of the compiler, not times.
"""

import argparse
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import tpu_static
from experiments.benchmarks.kernel_cases import BATCH, HEADS, TIME, with_gradients
from experiments.rows import Row, append_row

HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = ("tokamax", "ours")
DIRECTIONS = ("forward", "both")


def program(name: str, dim: int) -> tuple[Callable[..., Any], list[Any]]:
    """Outputs from q, k, v, decays and β, as each lays its arrays out, and the shapes of these."""
    import jax
    import jax.numpy as jnp

    shape = jax.ShapeDtypeStruct
    if name == "ours":
        from pallas_kernels.linear_rule import linear_rule

        def ours(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
            heads = [x.reshape(BATCH, TIME, HEADS, dim) for x in (q, k, v, decay)]
            return linear_rule(*heads, beta, delta=True, decay_first=True)[0].reshape(q.shape)

        wide = (BATCH, TIME, HEADS * dim)
        return ours, [
            *[shape(wide, jnp.bfloat16)] * 3,
            shape(wide, jnp.float32),
            shape((BATCH, TIME, HEADS), jnp.float32),
        ]
    from tokamax._src.ops.kda import api, pallas_mosaic_tpu

    for op in (
        pallas_mosaic_tpu.PallasMosaicTpuKimiDeltaAttention,
        pallas_mosaic_tpu.PallasMosaicTpuKimiDeltaAttentionVjp,
    ):
        op.supported_on = lambda self, device: True  # it asks for the device that runs Python
    kda = lambda q, k, v, g, beta: api.kimi_delta_attention(q, k, v, g, beta, scale=1.0, implementation="mosaic")[0]
    wide = (HEADS, BATCH, TIME, dim)
    return kda, [*[shape(wide, jnp.bfloat16)] * 3, shape(wide, jnp.float32), shape(wide[:3], jnp.float32)]


def calls(jaxpr: Any) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    """Shapes of operands and results, and grid steps, of each kernel of a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            arrays = [x.aval.shape for x in (*equation.invars, *equation.outvars)]
            yield arrays, math.prod(equation.params["grid_mapping"].grid)
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from calls(inner)


def kernel_steps(text: str, jaxpr: Any) -> dict[str, int]:
    """Name of each kernel in a compiled program → grid steps, found by the shapes of its arrays.

    Raises:
      ValueError: kernels with the same shapes have different grids, or one was not traced.
    """
    traced: dict[tuple[tuple[int, ...], ...], set[int]] = {}
    for arrays, steps in calls(jaxpr):
        traced.setdefault(tuple(arrays), set()).add(steps)
    dims = lambda kind: tuple(int(x) for x in kind[kind.index("[") + 1 : kind.index("]")].split(",") if x)
    found = {}
    for name, kinds in tpu_static.kernel_arrays(text).items():
        grids = traced.get(tuple(map(dims, kinds)), set())
        if len(grids) != 1:
            raise ValueError(f"{name}: {len(grids)} grids were traced for arrays {kinds}")
        (found[name],) = grids
    return found


def measure(name: str, topology: str, dim: int, direction: str, folder: str) -> Row:
    """Compiles one program; the compiler writes its schedules to the folder (`tpu_static.environment`)."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding, use_abstract_mesh

    device = topologies.get_topology_desc(tpu_static.CHIPS[topology].topology, platform="tpu").devices[0]
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    with use_abstract_mesh(Mesh([device], ("chip",)).abstract_mesh):  # tells kernels for which device
        function, shapes = program(name, dim)
        if direction == "both":
            shapes = [*shapes, jax.eval_shape(function, *shapes)]
            function = with_gradients(function)
        traced = jax.jit(function).trace(*map(place, shapes))
        compiled = traced.lower().compile()
    text, tokens = compiled.as_text(), BATCH * TIME * HEADS
    schedules = tpu_static.schedules(pathlib.Path(folder))
    steps = kernel_steps(text, traced.jaxpr.jaxpr)
    return {
        "kernels": {kernel: round(schedules[kernel]["bundles"] * n / tokens, 2) for kernel, n in steps.items()},
        "outside": round(tpu_static.estimated_cycles(text) / tokens, 2),
        "temporaries_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=tpu_static.CHIPS, default="v6e", help="the chip (default v6e)")
    parser.add_argument("--dim", type=int, default=128, help="d of a head (default 128)")
    parser.add_argument("--only", choices=PROGRAMS, help="one of the two")
    parser.add_argument(
        "--direction", choices=DIRECTIONS, help="forward, or forward and backward; default each of them"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "peer_tpu.jsonl", help="file of rows")
    parser.add_argument("--child", nargs=2, metavar=("DIRECTION", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.only, options.topology, options.dim, *options.child)))
        return
    names = [options.only] if options.only else list(PROGRAMS)
    missing = [x for x in ("libtpu", *(["tokamax"] if "tokamax" in names else [])) if not _version(x)]
    if missing:
        sys.exit(f"Not installed: {', '.join(missing)}. See --help.")
    for name in names:
        for direction in [options.direction] if options.direction else DIRECTIONS:
            row: Row = {"program": name, "topology": options.topology, "dim": options.dim, "direction": direction}
            row |= {x: _version(x) for x in ("jax", "libtpu", *(["tokamax"] if name == "tokamax" else []))}
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    __file__,
                    "--topology",
                    options.topology,
                    "--dim",
                    str(options.dim),
                    "--only",
                    name,
                ]
                variables = os.environ | tpu_static.environment(tpu_static.CHIPS[options.topology], folder)
                child = subprocess.run(
                    [*command, "--child", direction, folder], env=variables, capture_output=True, text=True, check=False
                )
            if child.returncode:
                sys.exit(f"{name} {direction}: {child.stderr[-2000:]}")
            row |= json.loads(child.stdout.splitlines()[-1])
            append_row(options.out, row)
            print(
                f"{name} {direction}: kernels {sum(row['kernels'].values()):.2f}, outside {row['outside']:.2f}",
                flush=True,
            )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
