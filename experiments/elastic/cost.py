"""Costs of a memory layer: its state (E Table 1), and training throughput relative to Transformer++ (E Table 8).

    python -m experiments.elastic.cost sizes
    python -m experiments.elastic.cost throughput                                     # 12 layers of width 720: minutes per model
    python -m experiments.elastic.cost throughput --layers 3 --length 2048 --block-size 512

The models follow E: attention within blocks in all layers except the 9th of 12, which has the memory (E §3.1). Transformer++ has
the same blocks. E uses blocks of 2,048 and sequences of 32,768 tokens; the defaults here are 1,024 and 4,096. Throughput is
forward and backward of the loss at batch 1. Models are timed in turn, the best of --repeats counts, and the result is relative to
Transformer++ in the same run. Rows are appended to --out.
"""

import argparse
import pathlib
import time
from typing import Any

from experiments import timing
from experiments.rows import append_row

HERE = pathlib.Path(__file__).parent
SIZES = {"8 heads": (8, 720), "12 heads": (12, 1080), "16 heads": (16, 1440)}
MEMORIES = ("elastic", "memorizing", "infini", "melodi")
ORDER = 540


def model(memory: str | None, heads: int, dim: int, layers: int, block_size: int, order: int, vocabulary: int) -> Any:
    """E's architecture around one memory layer. None gives Transformer++ with the same blocks."""
    from atlasjax import nn

    pattern = ["block_attention"] * layers
    if memory is not None:
        pattern[max(0, 3 * layers // 4 - 1)] = memory
    return nn.ModelConfig(
        vocab_size=vocabulary, dim=dim, num_layers=layers, num_heads=heads, head_dim=90, mixer=tuple(pattern),
        attention=nn.AttentionConfig(window=block_size), dtype="float32",
        block_attention=nn.BlockAttentionConfig(block_size), elastic=nn.ElasticConfig(order, block_size=block_size),
        memorizing=nn.MemorizingConfig(order, block_size), infini=nn.InfiniConfig(block_size),
        melodi=nn.MelodiConfig(order, block_size),
    )  # fmt: skip


def available(names: list[str]) -> list[str]:
    """The names that this version of the library has."""
    from atlasjax.nn import MIXERS

    missing = [name for name in names if name not in MIXERS]
    if missing:
        print(f"not in this version: {', '.join(missing)}")
    return [name for name in names if name in MIXERS]


def sizes(options: argparse.Namespace) -> None:
    """Numbers that a layer keeps for one sequence, by kind, at the widths that follow from E Table 4 and N = 540."""
    import jax

    from atlasjax.nn.elastic import ElasticMixer

    print("| heads | width | N | coefficients | samples | current block | float32 bytes of all |\n|" + " ---: |" * 7)
    for heads, dim in SIZES.values():
        config = model("elastic", heads, dim, 12, options.block_size, options.order, 256)

        def state(config: Any = config) -> Any:
            from flax import nnx

            return ElasticMixer(config, rngs=nnx.Rngs(0)).init_state(1, 8192)

        found = jax.eval_shape(state)
        size = {
            name: getattr(found, name).size
            for name in ("coefficients", "memory_keys", "memory_values", "keys", "values")
        }
        samples, block = size["memory_keys"] + size["memory_values"], size["keys"] + size["values"]
        total = 4 * (size["coefficients"] + samples + block)
        print(f"| {heads} | {dim} | {options.order} | {size['coefficients']:,} | {samples:,} | {block:,} | {total:,} |")


def throughput(options: argparse.Namespace) -> None:
    """Tokens per second of forward and backward, relative to Transformer++."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    from atlasjax.nn import LanguageModel

    heads, dim = SIZES[options.size]
    tokens = np.random.default_rng(0).integers(0, options.vocabulary, (1, options.length + 1), dtype=np.int32)
    steps = {}
    for name in (None, *available(options.memories)):
        config = model(name, heads, dim, options.layers, options.block_size, options.order, options.vocabulary)
        graphdef, params = nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)), nnx.Param)

        def loss(params: Any, tokens: Any, graphdef: Any = graphdef) -> Any:
            logits = nnx.merge(graphdef, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        start = time.perf_counter()
        compiled = jax.jit(jax.value_and_grad(loss)).lower(params, tokens).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        print(f"{name or 'transformer++'}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
        steps[name or "transformer++"] = (compiled, params, temporary)
    run = lambda compiled, params, _: lambda: jax.block_until_ready(compiled(params, tokens))
    best, rows = timing.in_turn({name: run(*step) for name, step in steps.items()}, options.repeats), []
    print("| memory | tokens a second | normalized | temporary bytes |\n| --- | ---: | ---: | ---: |")
    for name, seconds in best.items():
        row = {
            "memory": name, "tokens_per_second": round(options.length / seconds, 1),
            "normalized": round(best["transformer++"] / seconds, 3), "temporary_bytes": steps[name][2],
        }  # fmt: skip
        rows.append(row)
        print("| " + " | ".join(f"{x:,}" if isinstance(x, int) else str(x) for x in row.values()) + " |")
    settings = {key: getattr(options, key) for key in ("size", "layers", "length", "block_size", "order", "repeats")}
    append_row(options.out, {"device": str(jax.devices()[0].device_kind), **settings, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("sizes", "throughput"))
    parser.add_argument("--memories", nargs="+", default=["elastic"], choices=MEMORIES)
    parser.add_argument("--size", choices=SIZES, default="8 heads")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--order", type=int, default=ORDER)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "throughput.jsonl")
    options = parser.parse_args()
    {"sizes": sizes, "throughput": throughput}[options.command](options)


if __name__ == "__main__":
    main()
