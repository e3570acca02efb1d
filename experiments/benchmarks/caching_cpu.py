"""Memory Caching on this machine: its cost compared with its rule alone, and gated residual memory compared with softmax attention.

    python experiments/benchmarks/caching_cpu.py                       # 4,096 tokens, segments of 256
    python experiments/benchmarks/caching_cpu.py attention --lengths 8192 16384

float32, 4 heads of 64, batch 1, forward and backward with gradients of every input. Each round times everything once, in turn, and
the minima over rounds are compared, because only ratios within one run are meaningful. Bytes are the compiled programs' temporary
memory. Prints a table and, with `--out`, appends one JSON line per length.
"""

import argparse
import json
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HEADS, DIM = 4, 64


def rules():
    """The rules compared by "rule": name → rule. Times are relative to the first."""
    from atlasjax import memory
    from atlasjax import rules as named

    titans = named.titans(64)
    cached = lambda aggregation: memory.CachedRule(titans, aggregation, 256)
    return {"titans, MLP": titans} | {
        f"titans, {aggregation}": cached(aggregation) for aggregation in ("residual", "grm", "soup", "ssc")
    }


def matrices():
    """The rules that "attention" compares with softmax attention."""
    from atlasjax import memory
    from atlasjax import rules as named

    return {
        "linear attention": named.linear_attention(),
        "linear attention, grm": memory.CachedRule(named.linear_attention(), "grm", 256),
        "gated delta rule, grm": memory.CachedRule(named.gated_delta_rule(), "grm", 256),
    }


def inputs(rule, length):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from atlasjax import memory

    rng = np.random.default_rng(0)
    normal = lambda: rng.standard_normal((1, length, HEADS, DIM)).astype("float32")
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    gates = {}
    for name, channels in rule.gate_channels(DIM, DIM).items():
        shape = (1, length, HEADS) if channels is None else (1, length, HEADS, channels)
        ranges = {"retention": (0.98, 1.0), "momentum_decay": (0.5, 0.9), "connector": (-1.0, 1.0)}
        low, high = ranges.get(name, (1e-4, 1e-3))
        gates[name] = rng.uniform(low, high, shape).astype("float32")
    params = memory.init_params(rule, jax.random.key(0), num_heads=HEADS, key_dim=DIM, value_dim=DIM)
    return jax.tree.map(jnp.asarray, (params, unit(normal()), unit(normal()), normal(), memory.Gates(**gates)))


def compiled(loss, *args):
    """(function that runs forward and backward once and waits for the result, temporary bytes)."""
    import jax

    run = jax.jit(jax.grad(loss, argnums=tuple(range(len(args))))).lower(*args).compile()
    return (lambda: jax.block_until_ready(run(*args))), run.memory_analysis().temp_size_in_bytes


def programs(which, length):
    from atlasjax import memory

    table = rules() if which == "rule" else matrices()
    made = {}
    if which == "attention":
        from atlasjax.mixers.attention import attention

        _, q, k, v, _ = inputs(next(iter(table.values())), length)
        made["softmax attention"] = compiled(lambda q, k, v: (attention(q, k, v, rope_theta=None) ** 2).sum(), q, k, v)
    for name, rule in table.items():
        loss = lambda params, *args, rule=rule: (memory.scan(rule, params, None, *args)[0] ** 2).sum()
        made[name] = compiled(loss, *inputs(rule, length))
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", choices=("rule", "attention"), default="rule")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="file to which JSON lines are appended")
    options = parser.parse_args()
    for length in options.lengths or ([4096] if options.which == "rule" else [8192, 16384]):
        made = programs(options.which, length)
        seconds = dict.fromkeys(made, float("inf"))
        for round_ in range(options.repeats + 1):
            for name, (run, _) in made.items():
                start = time.perf_counter()
                run()
                if round_:  # the first round warms up
                    seconds[name] = min(seconds[name], time.perf_counter() - start)
        first = next(iter(seconds.values()))
        print(f"{length:,} tokens: seconds, times the first row, temporary MiB")
        for name, value in seconds.items():
            print(f"  {name:28s} {value:8.3f} {value / first:7.2f} {made[name][1] / 2**20:9.1f}", flush=True)
        if options.out:
            row = {"which": options.which, "length": length, "seconds": seconds}
            with open(options.out, "a") as file:
                file.write(json.dumps(row | {"bytes": {name: size for name, (_, size) in made.items()}}) + "\n")


if __name__ == "__main__":
    main()
