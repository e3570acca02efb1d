"""Products of rows with their experts on this machine: a tile at a time, and `jax.lax.ragged_dot`.

    python experiments/benchmarks/experts_cpu.py

float32, forward and backward, each expert as often as chance has it. Processor seconds, the least of `--repeats`, in turn. Prints a
table.
"""

import argparse
import pathlib
import sys
import time

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments import timing

# (rows, width, output, experts): a tiny model's batch, a larger layer, one token of it, few wide experts
SIZES = ((3072, 64, 64, 8), (4096, 256, 256, 64), (8, 256, 256, 64), (4096, 512, 1024, 16))


def seconds(rows: int, width: int, out: int, experts: int, repeats: int) -> list[float]:
    """Of the tiles, and of the ragged product."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from atlasjax.nn.grouped_products import in_tiles

    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((rows, width), (experts, width, out)))
    sizes = jnp.asarray(np.bincount(rng.integers(0, experts, rows), minlength=experts), jnp.int32)
    runs = {}
    for product in (in_tiles, jax.lax.ragged_dot):
        loss = lambda x, w, product=product: jnp.sum(product(x, w, sizes) ** 2)
        both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        runs[product] = lambda both=both: jax.block_until_ready(both(x, w))
    return list(timing.in_turn(runs, repeats, clock=time.process_time).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'rows × width → output, experts':34s} {'tiles, s':>10s} {'ragged, s':>10s} {'ratio':>7s}")
    for rows, width, out, experts in SIZES:
        tiles, ragged = seconds(rows, width, out, experts, options.repeats)
        name = f"{rows:,} × {width} → {out:,}, {experts}"
        print(f"{name:34s} {tiles:10.4f} {ragged:10.4f} {ragged / tiles:7.1f}", flush=True)


if __name__ == "__main__":
    main()
