"""Softmax memories compared with softmax attention of the same width on this machine, forward and backward.

    python experiments/benchmarks/softmax_memories_cpu.py                     # 1,024 and 2,048 tokens
    python experiments/benchmarks/softmax_memories_cpu.py --lengths 4096 --repeats 3

float32, 4 heads of 64, batch 1, gradients of every input and parameter. Attention is `atlasjax.mixers.attention` without rotation,
beside `jax.nn.dot_product_attention`. Each round times both and every memory once, in turn. The minima over rounds are compared,
because only ratios within one run are meaningful. Prints a table and, with `--out`, appends one JSON line.
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


def programs(length):
    """name → what runs forward and backward once."""
    import jax

    from atlasjax.mixers.attention import attention

    of = {
        name: (rule, timing.inputs(rule, length, HEADS, DIM, {"step_size": (0.0, 0.1)}))
        for name, rule in rules().items()
    }
    _, *tokens, _ = next(iter(of.values()))[1]
    own = lambda q, k, v: (attention(q, k, v, rope_theta=None) ** 2).sum()
    of_jax = lambda q, k, v: (jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2).sum()
    made = {"softmax attention": (own, tokens), "softmax attention, of jax.nn": (of_jax, tokens)}
    made |= {name: (timing.squares(rule), arrays) for name, (rule, arrays) in of.items()}
    return {name: timing.compiled(loss, *arrays)[0] for name, (loss, arrays) in made.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, help="file to which one JSON line is appended")
    args = parser.parse_args()
    result = {}
    for length in args.lengths:
        seconds = timing.in_turn(programs(length), args.repeats)
        base = seconds["softmax attention"]
        print(f"{length} tokens: forward and backward, seconds, and times softmax attention")
        for name, value in seconds.items():
            print(f"  {name:45s} {value:8.4f} {value / base:7.2f}")
        result[length] = seconds
    timing.keep(args.out, result)


if __name__ == "__main__":
    main()
