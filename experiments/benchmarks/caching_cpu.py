"""Memory Caching on this machine: its cost compared with its rule alone, and gated residual memory compared with softmax attention.

    python experiments/benchmarks/caching_cpu.py                       # 4,096 tokens, segments of 256
    python experiments/benchmarks/caching_cpu.py attention --lengths 8192 16384

float32, 4 heads of 64, batch 1, forward and backward with gradients of every input. Each round times everything once, in turn, and
the minima over rounds are compared, because only ratios within one run are meaningful. Bytes are the compiled programs' temporary
memory. Prints a table and, with `--out`, appends one JSON line per length.
"""

import argparse
import os
import pathlib
import sys

# When run as a script, Python searches only the folder of this file.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments import timing

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


def programs(which, length):
    """name → (what runs forward and backward once, temporary bytes)."""
    table = rules() if which == "rule" else matrices()
    of = {name: timing.inputs(rule, length, HEADS, DIM) for name, rule in table.items()}
    made = {}
    if which == "attention":
        from atlasjax.mixers.attention import attention

        _, *tokens, _ = next(iter(of.values()))
        loss = lambda q, k, v: (attention(q, k, v, rope_theta=None) ** 2).sum()
        made["softmax attention"] = timing.compiled(loss, *tokens)
    return made | {name: timing.compiled(timing.squares(rule), *of[name]) for name, rule in table.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", choices=("rule", "attention"), default="rule")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="file to which JSON lines are appended")
    options = parser.parse_args()
    for length in options.lengths or ([4096] if options.which == "rule" else [8192, 16384]):
        made = programs(options.which, length)
        seconds = timing.in_turn({name: run for name, (run, _) in made.items()}, options.repeats)
        first = next(iter(seconds.values()))
        print(f"{length:,} tokens: seconds, times the first row, temporary MiB")
        for name, value in seconds.items():
            print(f"  {name:28s} {value:8.3f} {value / first:7.2f} {made[name][1] / 2**20:9.1f}", flush=True)
        row = {"which": options.which, "length": length, "seconds": seconds}
        timing.keep(options.out, row | {"bytes": {name: size for name, (_, size) in made.items()}})


if __name__ == "__main__":
    main()
