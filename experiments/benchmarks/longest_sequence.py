"""The longest sequence of which one training step fits into 16 GB on this machine, and a step at that length.

    python -m experiments.benchmarks.longest_sequence                       # the rows of longest_sequence.jsonl that are missing
    python -m experiments.benchmarks.longest_sequence --presets atlas-tiny --gib 4 --out /tmp/rows.jsonl

One sequence, the preset's training step (forward, backward, AdamW), lengths doubled from 4,096 until the compiler's figures exceed
the limit or reach 1,048,576. Then a step runs at the longest length, in a process of its own, twice: the second is timed, and the
process's peak resident memory is recorded. `--compiled-only` leaves that out. `docs/generate.py` makes the table.
"""

import argparse
import dataclasses
import json
import operator
import os
import pathlib
import resource
import subprocess
import time

from experiments import timing
from experiments.rows import add_missing

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROWS = pathlib.Path(__file__).with_suffix(".jsonl")
PRESETS = (
    "gla-tiny", "gated-deltanet-tiny", "mamba2-tiny", "titans-tiny", "titans-mag-tiny", "titans-mac-tiny", "atlas-tiny", "gam-tiny",
    "elastic-exp-tiny", "titans-grm-tiny", "dot-tiny", "transformer++-tiny",
)  # fmt: skip
SHORTEST, LONGEST = 4096, 2**20


def training_step(preset: str, length: int):
    """(compiled step, state, batch) of one sequence, all abstract."""
    import jax
    import jax.numpy as jnp

    from atlasjax.distributed import MeshConfig, make_mesh
    from atlasjax.train import state as state_lib
    from atlasjax.train.defaults import default_config
    from atlasjax.train.optimizer import learning_rate, run_optimizer
    from atlasjax.train.step import jit_train_step

    config = default_config(preset)
    model, mesh = config.model, make_mesh(MeshConfig(1), jax.devices()[:1])
    if model.max_positions is not None:
        model = dataclasses.replace(model, max_positions=length)
    optimizer = run_optimizer(dataclasses.replace(config, model=model))
    graphdef, _ = state_lib.model_shapes(model)
    shardings, _ = state_lib.state_shardings(model, optimizer, mesh)
    state = state_lib.abstract_state(model, optimizer, shardings)
    types = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((1, length), dtype) for name, dtype in types.items()}
    step = jit_train_step(
        graphdef, optimizer, learning_rate(config.optimizer, config.steps), shardings, mesh, loss=config.loss
    )
    make_state = jax.jit(lambda key: state_lib.init_state(model, optimizer, key))
    return step.lower(state, batch).compile(), make_state, batch


def run(preset: str, length: int) -> dict:
    """Two steps on random tokens. Seconds of the second, and the loss, which must be finite."""
    import jax
    import numpy as np

    step, make_state, batch = training_step(preset, length)
    tokens = np.random.default_rng(0).integers(32, 127, (1, length)).astype(np.int32)
    given = {"inputs": tokens, "targets": tokens, "weights": np.ones((1, length), np.float32)}
    assert given.keys() == batch.keys()
    state = make_state(jax.random.key(0))
    for _ in range(2):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, given))
    seconds = time.perf_counter() - start
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "peak_resident_bytes": peak, "loss": float(metrics["loss"])}


def in_child(*arguments: str, minutes: float | None = None) -> dict | int | str:
    """The output of this file for some arguments; the last line of its messages if it fails."""
    try:
        done = timing.child("experiments.benchmarks.longest_sequence", *arguments, minutes=minutes)
    except subprocess.TimeoutExpired:
        return f"not finished in {minutes:g} minutes"
    return timing.last_line(done) if done.returncode == 0 else done.stderr.strip()[-300:]


def search(preset: str, limit: int) -> dict:
    """The row of a preset, without the run."""
    length, best = SHORTEST, {}
    while length <= LONGEST:
        found = in_child("--bytes", preset, str(length))
        if not isinstance(found, int) or found > limit:
            return best | {"next": found}
        best = {"tokens": length, "step_bytes": found}
        length *= 2
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="PRESET")
    parser.add_argument("--gib", type=float, default=16e9 / 2**30, help="the limit; 16 GB by default")
    parser.add_argument(
        "--minutes", type=float, default=10, help="a run that takes longer is ended, and its row says so"
    )
    parser.add_argument("--compiled-only", action="store_true", help="do not run a step")
    parser.add_argument("--out", type=pathlib.Path, default=ROWS)
    parser.add_argument("--bytes", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bytes:
        print(timing.program_bytes(training_step(args.bytes[0], int(args.bytes[1]))[0]))
    elif args.run:
        print(json.dumps(run(args.run[0], int(args.run[1]))))
    else:
        limit = int(args.gib * 2**30)

        def row_of(preset: str) -> dict:
            row = {"preset": preset, "limit_bytes": limit, **search(preset, limit)}
            if "tokens" in row and not args.compiled_only:
                ran = in_child("--run", preset, str(row["tokens"]), minutes=args.minutes)
                row |= ran if isinstance(ran, dict) else {"error": str(ran)}
            return row

        add_missing(args.out, operator.itemgetter("preset"), args.presets, row_of)


if __name__ == "__main__":
    main()
