"""The cost of Newton–Schulz inside a memory on this machine: Atlas compared with its twin without it, against `every`.

    python experiments/benchmarks/muon_cpu.py                          # adds rows that are missing to muon_cpu.jsonl
    python experiments/benchmarks/muon_cpu.py --tree ../before         # the same, with the times of another checkout next to it
    python experiments/benchmarks/muon_cpu.py --dims 64 --every 1 8

float32, one head, batch 1, window 4, chunks of 64, elementwise powers of degree 2, MLPs of the presets' expansion (2 at 32
channels, 4 otherwise), without the bound. The twin is the same rule with momentum in place of Muon, which has a dual form. Forward,
and forward and backward with gradients of every input and parameter. Each process has one core; all programs of a row, also those
of the other checkout, are timed in turn, and the best round counts, in seconds of processor time. FLOPs are counted
(`atlasjax.flops`).
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = pathlib.Path(__file__).with_suffix(".jsonl")
SIZES = {32: (2, 256), 64: (4, 128), 128: (4, 64)}  # dim → expansion, tokens
EVERY = (1, 2, 4, 8, 16, 32)
PASSES = ("forward", "gradient")
RULES = ("atlas", "twin")
SHORTEST = 0.05  # seconds that are measured together


def programs(names, dim, every):
    """(rule, pass) → (function, arguments), for the rules "atlas" and "twin" that are named."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np

    from atlasjax import memory, rules
    from atlasjax.memory import features, optimizers, structures

    expansion, tokens = SIZES[dim]
    atlas = rules.atlas(
        64, structure=structures.MLP(expansion=expansion), features=features.Powers(2), newton_schulz_every=every
    ).unbounded()
    twin = dataclasses.replace(atlas, optimizer=optimizers.Momentum())
    rng = np.random.default_rng(0)
    normal = lambda: rng.standard_normal((1, tokens, 1, dim)).astype("float32")
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    ranges = {
        "retention": (0.95, 1),
        "momentum_decay": (0.5, 0.95),
        "step_size": (0.0, 0.01),
        "window_weights": (0.1, 1),
    }
    gates = {}
    for name, channels in atlas.gate_channels(dim, dim).items():
        shape = (1, tokens, 1) if channels is None else (1, tokens, 1, channels)
        gates[name] = rng.uniform(*ranges[name], shape).astype("float32")
    values = (unit(normal()), unit(normal()), normal(), memory.Gates(**gates))
    made = {}
    for name in names:
        rule = {"atlas": atlas, "twin": twin}[name]
        params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=dim, value_dim=dim)
        forward = lambda params, *args, rule=rule: memory.scan(rule, params, None, *args)
        loss = lambda *args, forward=forward: (forward(*args)[0] ** 2).sum()
        args = jax.tree.map(jnp.asarray, (params, *values))
        made[name, "forward"] = forward, args
        made[name, "gradient"] = jax.grad(loss, argnums=(0, 1, 2, 3, 4)), args
    return made


def work(names, dim, every):
    """A child process: prints FLOPs, then times all programs once for each line of its input."""
    import jax

    from atlasjax.flops import count_flops

    made = programs(names, dim, every)
    flops = {"/".join(name): count_flops(f, *args) for name, (f, args) in made.items()}
    runs = {}
    for name, (f, args) in made.items():
        compiled = jax.jit(f).lower(*args).compile()
        run = functools.partial(lambda compiled, args: jax.block_until_ready(compiled(*args)), compiled, args)
        run()
        start = time.process_time()
        run()
        runs[name] = run, max(1, int(SHORTEST / (time.process_time() - start + 1e-6)))
    print(json.dumps(flops), flush=True)
    for _ in sys.stdin:
        seconds = {}
        for name, (run, times) in runs.items():
            start = time.process_time()
            for _ in range(times):
                run()
            seconds["/".join(name)] = (time.process_time() - start) / times
        print(json.dumps(seconds), flush=True)


def child(tree, names, dim, every):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--work", *names, "--dims", str(dim), "--every", str(every)]
    core = max(os.sched_getaffinity(0))
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


def measure(trees, dim, every, rounds):
    """tree name → {"flops": …, "seconds": …}, from children that run in turn."""
    # The twin is that of this checkout.
    children = {name: child(tree, RULES[: 1 + (name == "now")], dim, every) for name, tree in trees.items()}
    result = {}
    for name, process in children.items():
        flops = json.loads(process.stdout.readline())
        result[name] = {"flops": flops, "seconds": dict.fromkeys(flops, float("inf"))}
    for _ in range(rounds):
        for name, process in children.items():
            process.stdin.write("\n")
            process.stdin.flush()
            seconds = result[name]["seconds"]
            for program, value in json.loads(process.stdout.readline()).items():
                seconds[program] = min(seconds[program], value)
    for process in children.values():
        process.stdin.close()
        process.wait()
    return result


def ratio(row, tree, what, pass_):
    """Seconds or FLOPs of Atlas in a checkout, divided by those of its twin in this one."""
    return row[tree][what][f"atlas/{pass_}"] / row["now"][what][f"twin/{pass_}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--every", type=int, nargs="+", default=list(EVERY))
    parser.add_argument("--tree", type=pathlib.Path, help="another checkout, timed next to this one as `before`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="rows that it already has are not measured again")
    parser.add_argument("--work", choices=RULES, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, *options.dims, *options.every)
        return
    trees = {"now": ROOT} | ({"before": options.tree.resolve()} if options.tree else {})
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {(row["dim"], row["every"]) for row in map(json.loads, lines)}
    for dim in options.dims:
        for every in options.every:
            if (dim, every) in done:
                continue
            result = measure(trees, dim, every, options.rounds)
            expansion, tokens = SIZES[dim]
            row = {
                "dim": dim,
                "expansion": expansion,
                "tokens": tokens,
                "every": every,
                "rounds": options.rounds,
                **result,
            }
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            for name in result:
                shown = [
                    f"{pass_} {ratio(row, name, 'seconds', pass_):7.1f} times the twin"
                    f" ({ratio(row, name, 'flops', pass_):7.1f} in FLOPs)"
                    for pass_ in PASSES
                ]
                print(f"{dim:4d} every {every:2d} {name:7s}", "   ".join(shown), flush=True)


if __name__ == "__main__":
    main()
