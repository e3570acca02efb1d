"""Softmax memories compared with softmax attention of the same width on this machine, forward and backward.

    python experiments/benchmarks/softmax_memories_cpu.py                     # 1,024 and 2,048 tokens
    python experiments/benchmarks/softmax_memories_cpu.py --lengths 4096 --repeats 3

float32, 4 heads of 64, batch 1, gradients of every input and parameter. Attention is `atlasjax.mixers.attention` without rotation,
beside `jax.nn.dot_product_attention`. Each round times both and every memory once, in turn. The minima over rounds are compared,
because only ratios within one run are meaningful. Prints a table and, with `--out`, appends one JSON line.
"""

import argparse
import json
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HEADS, DIM = 4, 64


def rules():
    """The compared rules: name → rule."""
    from atlasjax.memory import objectives, optimizers, structures
    from atlasjax.memory.axes.retention import Full
    from atlasjax.memory.softmax import SoftmaxRule

    matrix, mlp = structures.Matrix(), structures.MLP()
    return {
        "DeepTransformer, matrix, no decay": SoftmaxRule(matrix, retention=Full()),
        "DeepTransformer, matrix": SoftmaxRule(matrix),
        "DeepTransformer, MLP, expansion 1": SoftmaxRule(structures.MLP(expansion=1)),
        "DeepTransformer, MLP, expansion 4": SoftmaxRule(mlp),
        "SWDT, MLP, expansion 4, last 256": SoftmaxRule(mlp, cache_window=256),
        "DOT, matrix, window 4": SoftmaxRule(matrix, objectives.L2(), window=4),
        "DOT, MLP, expansion 4, window 4, momentum": SoftmaxRule(mlp, objectives.L2(), optimizers.Momentum(), window=4),
    }


def inputs(rule, length):
    import jax.numpy as jnp
    import numpy as np

    from atlasjax.memory import Gates

    rng = np.random.default_rng(0)
    normal = lambda: rng.standard_normal((1, length, HEADS, DIM)).astype("float32")
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    ranges = {
        "retention": (0.95, 1.0),
        "step_size": (0.0, 0.1),
        "momentum_decay": (0.5, 0.9),
        "window_weights": (0.0, 1.0),
    }
    gates = {}
    for name, channels in rule.gate_channels(DIM).items():
        shape = (1, length, HEADS) if channels is None else (1, length, HEADS, channels)
        gates[name] = jnp.asarray(rng.uniform(*ranges[name], shape), jnp.float32)
    return jnp.asarray(unit(normal())), jnp.asarray(unit(normal())), jnp.asarray(normal()), Gates(**gates)


def compiled(length):
    """name → function that runs forward and backward once and waits for the result."""
    import jax

    from atlasjax import memory
    from atlasjax.mixers.attention import attention

    def runner(loss, *args):
        run = jax.jit(jax.grad(loss, argnums=tuple(range(len(args))))).lower(*args).compile()
        return lambda: jax.block_until_ready(run(*args))

    names = rules()
    q, k, v, _ = inputs(next(iter(names.values())), length)
    own = lambda q, k, v: (attention(q, k, v, rope_theta=None) ** 2).sum()
    of_jax = lambda q, k, v: (jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2).sum()
    runs = {"softmax attention": runner(own, q, k, v), "softmax attention, of jax.nn": runner(of_jax, q, k, v)}
    for name, rule in names.items():
        params = memory.init_params(rule, jax.random.key(0), num_heads=HEADS, key_dim=DIM, value_dim=DIM)
        loss = lambda params, q, k, v, gates, rule=rule: (memory.scan(rule, params, None, q, k, v, gates)[0] ** 2).sum()
        runs[name] = runner(loss, params, *inputs(rule, length))
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", help="file to which one JSON line is appended")
    args = parser.parse_args()
    result = {}
    for length in args.lengths:
        runs = compiled(length)
        seconds = {name: float("inf") for name in runs}
        for round_ in range(args.repeats + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if round_:  # the first round warms up
                    seconds[name] = min(seconds[name], time.perf_counter() - start)
        base = seconds["softmax attention"]
        print(f"{length} tokens: forward and backward, seconds, and times softmax attention")
        for name, value in seconds.items():
            print(f"  {name:45s} {value:8.4f} {value / base:7.2f}")
        result[length] = seconds
    if args.out:
        with open(args.out, "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
