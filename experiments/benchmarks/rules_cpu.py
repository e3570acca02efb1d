"""Every rule's engine on this machine: block form against token scan, and decoding after short and long texts.

    python experiments/benchmarks/rules_cpu.py blocks      # linear and delta rules at 4,096 tokens, forward and backward
    python experiments/benchmarks/rules_cpu.py speed       # tokens per second beside Gated DeltaNet's rule
    python experiments/benchmarks/rules_cpu.py decode      # time per token after reading 1,000 and 100,000

float32, batch 1. The two sides of a ratio are timed in turn, and the best time of each counts. Each command prints a table and
appends one JSON line to `--out`.
"""

import argparse
import functools
import pathlib
import sys

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments import timing

# Rules with an exact block-parallel form. Their block length does not affect the result, so the token scan computes the same
# function.
BLOCK_PARALLEL = (
    "linear_attention", "retnet", "gla", "polysketch", "delta_rule", "longhorn", "longhorn_channel", "gated_delta_rule",
    "rwkv7", "rwkv7_one_key", "swla",
)  # fmt: skip


def inputs(rule, length, heads, dim):
    return timing.inputs(rule, length, heads, dim, {} if getattr(rule, "is_linear", False) else timing.SMALL_STEPS)


def alternate(runs, repeats):
    """The best time of each function; the functions are timed in turn."""
    return list(timing.in_turn(dict(enumerate(runs)), repeats).values())


def blocks(options):
    """Forward and backward with gradients of every input: `memory.scan` against two scans over tokens.

    "step" is a `lax.scan` of `memory.step`, the fastest recurrence available here; "definition" is `memory.reference`.
    """
    import jax
    import jax.numpy as jnp

    from atlasjax import memory, rules

    rows = []
    for name in options.rules or BLOCK_PARALLEL:
        rule = rules.REGISTRY[name]()
        if name == "polysketch":
            from atlasjax.memory.axes.features import TensorSketch

            rule = rules.polysketch(features=TensorSketch(2, options.dim))
        args = inputs(rule, options.length, options.heads, options.dim)

        def token(params, rule, state, x):
            y, state = memory.step(rule, params, state, *x)
            return state, y

        def by_token(params, *args, rule=rule, token=token):
            state = memory.init_state(rule, params, batch_size=1)
            tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), args)
            return jnp.sum(jax.lax.scan(functools.partial(token, params, rule), state, tokens)[1] ** 2)

        def by_definition(params, *args, rule=rule):
            return jnp.sum(memory.reference(rule, params, None, *args)[0] ** 2)

        forms = [timing.squares(rule), by_token, by_definition]
        if rule.optimizer.is_implicit:
            forms.pop()  # its definition solves a system for every token and channel, which takes hours
        functions = [jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3, 4))) for f in forms]
        values = [float(f(*args)[0]) for f in functions]
        assert max(values) - min(values) <= 1e-3 * abs(values[1]), (name, values)
        runs = [lambda f=f, args=args: jax.block_until_ready(f(*args)) for f in functions]
        block, step, *rest = alternate(runs, options.repeats)
        definition = rest[0] if rest else float("nan")
        rows.append({"rule": name, "block_s": block, "step_s": step, "definition_s": definition if rest else None})
        print(
            f"{name:18s} block form {block:6.3f} s   step by step {step:6.3f} s, {step / block:5.1f} times   "
            f"definition {definition:6.3f} s, {definition / block:5.1f} times", flush=True,
        )  # fmt: skip
    return {"length": options.length, "heads": options.heads, "dim": options.dim, "rows": rows}


PRODUCT, WRITES = "gated_deltaproduct, 2 writes", 2  # rows of `gated_delta_rule` for each token


def year():
    """The rules of 2026, and those that they are compared with, by name. Chunks as published, or the shortest of them."""
    from atlasjax import memory, rules

    return {
        "kda": rules.kda(),
        "gdn2": rules.gdn2(),
        "comba": rules.comba(),
        "pgdn": rules.pgdn(),
        PRODUCT: rules.gated_delta_rule(),
        "mamba3": rules.mamba3(),
        "momentum_delta": rules.momentum_delta(),
        "mesa": rules.mesa(),
        "mesa, exact": rules.mesa("exact"),
        "lact, chunks of 2,048": rules.lact(),
        "lact without Newton–Schulz": rules.lact(schedule=None),
        "titans, chunks of 8": rules.titans(8),
        "titans, chunks of 16": rules.titans(16),
        "titans, chunks of 64": rules.titans(),
        "TNT of titans, chunks of 8 in 2,048": memory.HierarchicalRule(rules.titans(), 2048, (8,), 2048),
    }


def speed(options):
    """Forward and backward with gradients of every input, each rule in turn with `gated_delta_rule`."""
    import jax

    from atlasjax import rules

    def run_of(rule, rows=1):
        args = inputs(rule, rows * options.length, options.heads, options.dim)
        function = jax.jit(jax.value_and_grad(timing.squares(rule), argnums=(0, 1, 2, 3, 4)))
        return lambda: jax.block_until_ready(function(*args))

    found, base, rows = year(), run_of(rules.gated_delta_rule()), []
    for name in options.rules or found:
        beside, seconds = alternate([base, run_of(found[name], WRITES if name == PRODUCT else 1)], options.repeats)
        rows.append({"rule": name, "seconds": seconds, "gated_delta_rule_s": beside})
        print(
            f"{name:36s} {options.length / seconds:9,.0f} tokens/s   {seconds / beside:6.2f} times gated_delta_rule's time",
            flush=True,
        )
    return {"length": options.length, "heads": options.heads, "dim": options.dim, "rows": rows}


def decode(options):
    """Time of one `memory.step` after reading a short and a long text."""
    import jax

    from atlasjax import memory, rules

    short, long = 1_000, 100_000
    rows = []
    for name in options.rules or rules.REGISTRY:
        rule = rules.REGISTRY[name]()
        if isinstance(rule, memory.SoftmaxRule) and rule.cache_window is None:
            continue  # it caches every token, so a step costs one read of that cache
        params, *arrays = inputs(rule, 1_000, 1, 16)
        read = jax.jit(lambda state, *arrays, rule=rule, params=params: memory.scan(rule, params, state, *arrays)[1])
        step = jax.jit(lambda state, *arrays, rule=rule, params=params: memory.step(rule, params, state, *arrays))
        one = jax.tree.map(lambda x: x[:, 0], tuple(arrays))
        state, states = memory.init_state(rule, params, batch_size=1), {}
        for done in range(1_000, long + 1, 1_000):
            state = read(state, *arrays)
            if done in (short, long):
                states[done] = state

        def run(state, one=one, step=step):
            for _ in range(options.tokens):
                y, state = step(state, *one)
            jax.block_until_ready(y)

        runs = [lambda state=states[n], run=run: run(state) for n in (short, long)]
        seconds = [s / options.tokens for s in alternate(runs, options.repeats)]
        rows.append({"rule": name, "short_s": seconds[0], "long_s": seconds[1], "ratio": seconds[1] / seconds[0]})
        print(
            f"{name:20s} after {short:,}: {1e6 * seconds[0]:7.1f} µs   after {long:,}: {1e6 * seconds[1]:7.1f} µs   "
            f"{seconds[1] / seconds[0]:.2f} times", flush=True,
        )  # fmt: skip
    return {"heads": 1, "dim": 16, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("blocks", "speed", "decode"))
    parser.add_argument(
        "--rules", nargs="*", help="names of atlasjax.rules.REGISTRY; all that the command is about if not given"
    )
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300, help="decoded per measurement")
    parser.add_argument("--out", type=pathlib.Path, help="append the result as a JSON line to this file")
    options = parser.parse_args()
    result = {"blocks": blocks, "speed": speed, "decode": decode}[options.command](options)
    timing.keep(options.out, {"python": sys.version.split()[0], "command": options.command, **result})


if __name__ == "__main__":
    main()
