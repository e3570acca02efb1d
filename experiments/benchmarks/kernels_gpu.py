"""The compiler's report on `memory.scan` for an H200, with kernels and with the XLA engine. No GPU is used and nothing is timed.

    python experiments/benchmarks/kernels_gpu.py                       # all cases; finished ones are not compiled again
    python experiments/benchmarks/kernels_gpu.py --only omeganet 64    # some
    python experiments/benchmarks/kernels_gpu.py --again               # recompile finished ones

Needs `pip install 'atlasjax[cuda-compile]'`. Launches are counted in the compiled program's text, with loop bodies counted once per
iteration. Temporary bytes are the compiler's. Seconds are those of all processors: to trace and compile the call, and to compile a
kernel by itself.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import gpu_static  # before jax

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip

from atlasjax import memory, rules, storage
from atlasjax.memory import features
from experiments.benchmarks.launches import launches
from experiments.rows import read_rows

HERE = pathlib.Path(__file__).resolve().parent
BATCH, TIME, HEADS = 8, 8192, 16
RULES = {
    "omeganet": lambda: rules.omeganet(chunk_size=64, window=4, features=features.Identity()),
    "omeganet, unbounded": lambda: RULES["omeganet"]().unbounded(),
    "titans": lambda: rules.titans(chunk_size=64),
    "titans, unbounded": lambda: RULES["titans"]().unbounded(),
    "delta_rule": lambda: rules.delta_rule().unbounded(),
    "gated_delta_rule": lambda: rules.gated_delta_rule().unbounded(),
    "kda": lambda: rules.kda().unbounded(),
    "gla": lambda: rules.gla(64).unbounded(),
    "rwkv7": lambda: rules.rwkv7().unbounded(),
    "rwkv7_one_key": lambda: rules.rwkv7_one_key().unbounded(),
}
ENGINES, DIRECTIONS = ("xla", "pallas_gpu"), ("forward", "both")


def cases() -> list[tuple[str, int, str, str]]:
    """(rule, head dimension, engine, direction) of each case. Tokens are bfloat16."""
    dims = {name: (64,) if name.startswith("titans") else (64, 128) for name in RULES}
    return [(name, d, engine, way) for name in RULES for d in dims[name] for engine in ENGINES for way in DIRECTIONS]


def measure(name: str, dim: int, engine: str, direction: str) -> dict[str, Any]:
    rule, shape = RULES[name](), (BATCH, TIME, HEADS)
    array = lambda *sizes, dtype="float32": jax.ShapeDtypeStruct((*shape, *sizes), dtype)
    make = lambda: memory.init_params(rule, jax.random.key(0), num_heads=HEADS, key_dim=dim, value_dim=dim)
    channels = rule.gate_channels(dim).items()
    gates = memory.Gates(**{gate: array(*([n] if n else [])) for gate, n in channels})
    tokens = array(dim, dtype="bfloat16")
    arguments = [jax.eval_shape(make), tokens, tokens, tokens, gates]

    def call(params: Any, q: Any, k: Any, v: Any, gates: Any) -> jax.Array:
        return memory.scan(rule, params, None, q, k, v, gates, implementation=engine)[0]

    loss = lambda *arrays: jnp.sum(call(*arrays).astype(jnp.float32) ** 2)
    function = jax.grad(loss, argnums=tuple(range(5))) if direction == "both" else call
    alone = gpu_static.seconds_alone(function, arguments)
    start = gpu_static.processor_seconds()
    program = gpu_static.compiled(function, arguments)
    took = gpu_static.processor_seconds() - start
    return {
        "case": [name, dim, engine, direction],
        "jax": jax.__version__,
        "launches": launches(program.as_text()),
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "processor_seconds": round(took, 1),
        "kernels": [
            kernel._asdict() | {"processor_seconds": alone[kernel.name]} for kernel in gpu_static.kernels(program)
        ],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Launches and bytes, then the kernels, as Markdown."""
    found = {tuple(row["case"]): row for row in rows}
    lines = [
        "<!-- made by kernels_gpu.py -->",
        f"Compiled for an H200 without one, jax {', '.join(sorted({row['jax'] for row in rows}))}: {BATCH} × {HEADS} rows of "
        f"{TIME:,} tokens, bfloat16. Launches are kernels and library calls per call. Nothing was timed.",
        "",
        "| rule | head dim | | launches, XLA | launches, kernels | GB temporary, XLA | GB temporary, kernels | s to compile, XLA | "
        "s to compile, kernels |",
        "| --- | ---: | --- |" + " ---: |" * 6,
    ]
    for name, dim, _, direction in (case for case in cases() if case[2] == "xla"):
        pair = [found.get((name, dim, other, direction)) for other in ENGINES]
        if not any(pair):
            continue
        numbers = ["" if row is None else f"{row['launches']:,}" for row in pair]
        numbers += ["" if row is None else f"{row['temp_bytes'] / 1e9:.2f}" for row in pair]
        numbers += ["" if row is None else str(row.get("processor_seconds", "")) for row in pair]
        what = "forward" if direction == "forward" else "forward and backward"
        lines.append(f"| {name} | {dim} | {what} | {' | '.join(numbers)} |")
    lines += [
        "",
        "| rule | head dim | kernel | registers | bytes spilled | bytes shared | threads | s to compile |",
        "| --- | ---: | --- |" + " ---: |" * 5,
    ]
    for (name, dim, _, direction), row in found.items():
        for kernel in row["kernels"] if direction == "both" else ():
            values = {"processor_seconds": "", **kernel}  # an older row has none
            order = (*gpu_static.Kernel._fields, "processor_seconds")
            lines.append(f"| {name} | {dim} | " + " | ".join(str(values[field]) for field in order) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a case must all have")
    parser.add_argument("--again", action="store_true", help="recompile finished cases")
    options = parser.parse_args()
    path = HERE / "kernels_gpu.jsonl"
    done = {tuple(row["case"]): row for row in read_rows(path)}
    todo = [case for case in cases() if all(word in map(str, case) for word in options.only)]
    todo = [case for case in todo if options.again or case not in done]
    for number, case in enumerate(todo, 1):
        print(f"{number}/{len(todo)} {' '.join(map(str, case))}", end=" ", flush=True)
        done[case] = measure(*case)
        print(f"{done[case]['launches']:,} launches, {done[case]['processor_seconds']} s", flush=True)
        rows = [done[case] for case in cases() if case in done]
        storage.write_whole(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        path.with_suffix(".md").write_text(table(rows))
    print((HERE / "kernels_gpu.md").read_text() if todo else f"nothing to do; the table is {HERE / 'kernels_gpu.md'}")


if __name__ == "__main__":
    main()
