"""Memory of each device when the tokens of a linear memory are divided over devices, and the two grow together.

    python -m experiments.benchmarks.sequence_parallel
    python -m experiments.benchmarks.sequence_parallel --out build/sequence_parallel.jsonl

Forward and backward of `memory.scan` with `Partition(mesh, time=…)`: the gated delta rule, 16 heads of 64, batch 1, bfloat16, 8,192
tokens for each of 1 to 64 simulated CPU devices, so up to 524,288 tokens. Nothing runs: the bytes are those of the compiled
program, and the exchanged ones those of its collectives' results on one device. Prints the rows and replaces those of `--out`.
"""

import argparse
import os
import pathlib
import re

from experiments.rows import append_rows

ROWS = pathlib.Path(__file__).with_suffix(".jsonl")
DEVICES, TOKENS, HEADS, DIM = (1, 4, 16, 64), 8192, 16, 64
_BYTES = {"f32": 4, "bf16": 2, "s32": 4}
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def exchanged(program: str) -> int:
    """Bytes of the results of all collectives in the text of a compiled program."""
    total = 0
    for shapes, _ in _COLLECTIVE.findall(program):
        for dtype, dims in _ARRAY.findall(shapes):
            size = _BYTES[dtype]
            for n in filter(None, dims.split(",")):
                size *= int(n)
            total += size
    return total


def measure(devices: int) -> dict[str, int]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from atlasjax import memory, rules

    rule = rules.gated_delta_rule()
    mesh = jax.make_mesh((devices,), ("sequence",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    partition = memory.Partition(mesh, time=("sequence",))
    time = devices * TOKENS
    params = memory.init_params(rule, jax.random.key(0), num_heads=HEADS, key_dim=DIM, value_dim=DIM)
    over = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=over)
    tokens = of((1, time, HEADS, DIM), jnp.bfloat16)
    gates = memory.Gates(**{name: of((1, time, HEADS), jnp.float32) for name in rule.gate_channels(DIM, DIM)})

    def loss(q, k, v, gates):
        return (memory.scan(rule, params, None, q, k, v, gates, partition=partition)[0].astype(jnp.float32) ** 2).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(tokens, tokens, tokens, gates).compile()
    found = compiled.memory_analysis()
    return {
        "devices": devices, "tokens": time, "argument_bytes": found.argument_size_in_bytes,
        "temporary_bytes": found.temp_size_in_bytes, "exchanged_bytes": exchanged(compiled.as_text()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROWS, help="the rows, of which old ones are replaced")
    args = parser.parse_args()
    # JAX reads both when it is first used.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(DEVICES)}"
    rows = []
    for devices in DEVICES:
        rows.append(measure(devices))
        print(rows[-1], flush=True)
    args.out.unlink(missing_ok=True)
    append_rows(args.out, rows)


if __name__ == "__main__":
    main()
