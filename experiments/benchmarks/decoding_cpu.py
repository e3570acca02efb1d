"""Speed of decoding on this machine: each architecture beside the same model with softmax attention, batch 1 and 32.

    python -m experiments.benchmarks.decoding_cpu                        # the rows of decoding_cpu.jsonl that are missing
    python -m experiments.benchmarks.decoding_cpu --only atlas titans    # some architectures, in the names of presets
    python -m experiments.benchmarks.decoding_cpu --all                  # every architecture
    python -m experiments.benchmarks.decoding_cpu --size 170m            # larger models, after 2,048 tokens

Models with parameters as they are initialized, in float32. A prompt is read once; then `generate` samples 64 tokens in one compiled
loop. The twin is the same config with the mixer "attention". The two are timed in turn, five times, and the fastest
times are compared, because only ratios within one row are meaningful. The bound is what a step has to move (parameters read once,
and each row's state read and written once) over the bandwidth of a copy, measured in the same row. A row of which the numbers need
more than 8 GiB only says so. A stopped command goes on with the row where it was.
`docs/generate.py` makes the table.
"""

import argparse
import dataclasses
import os
import pathlib
import time

from experiments.rows import append_row, read_rows

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROWS = pathlib.Path(__file__).with_suffix(".jsonl")
TOKENS, REPEATS = 64, 5
PROMPTS, BATCHES = (64, 2048), (1, 32)
MOST_BYTES = 8 * 2**30  # of parameters and states of a row
MAIN = (
    "gla", "retnet", "gated-deltanet", "mamba2", "rwkv7", "log-linear", "gam", "elastic-exp", "ttt-linear", "ttt-mlp", "titans",
    "titans-grm", "titans-mac", "titans-mag", "dla", "swla", "omeganet", "atlas", "atlas-mag", "deep-transformer", "swdt", "dot",
)  # fmt: skip


def decoder(config, batch, prompt):
    """(function that samples the tokens once and waits for them, bytes of the parameters, bytes of a row's state)."""
    import jax
    import numpy as np
    from flax import nnx

    from atlasjax.generate import generate, read
    from atlasjax.nn import LanguageModel

    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(32, 127, (1, prompt))
    context = read(model, tokens, max_length=prompt + TOKENS).rows(np.zeros(batch, int))
    run = lambda: jax.block_until_ready(generate(model, None, TOKENS, context=context))
    run()
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return run, params, context.num_bytes // batch


def copy_rate():
    """Bytes moved per second by a copy: read and written."""
    import numpy as np

    source = np.ones(2**26, np.uint8)
    target = np.empty_like(source)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds)


def measure(name, batch, prompt, size):
    from atlasjax.nn.abstract import count_parameters, state_bytes
    from atlasjax.presets import get_preset

    config = dataclasses.replace(get_preset(f"{name}-{size}"), dtype="float32")
    if config.max_positions is not None:  # a table of learned positions as long as the sequence
        config = dataclasses.replace(config, max_positions=max(config.max_positions, prompt + TOKENS))
    twin = dataclasses.replace(config, mixer="attention")
    key = {"model": name, "size": size, "batch": batch, "prompt": prompt}
    for one in (config, twin):
        needed = 4 * count_parameters(one) + batch * state_bytes(one, length=prompt + TOKENS)
        if needed > MOST_BYTES:
            return key | {"needed_bytes": needed}
    runs = [decoder(one, batch, prompt) for one in (config, twin)]
    best = [float("inf")] * 2
    for _ in range(REPEATS):
        for i, (run, *_) in enumerate(runs):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    (_, params, state), (_, _, twin_state) = runs
    moved = params + 2 * batch * state
    return key | {
        "tokens_per_second": batch * TOKENS / best[0],
        "twin_tokens_per_second": batch * TOKENS / best[1], "param_bytes": params, "state_bytes": state,
        "twin_state_bytes": twin_state, "bound_tokens_per_second": batch * copy_rate() / moved,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=MAIN, metavar="ARCHITECTURE")
    parser.add_argument("--all", action="store_true", help="every architecture")
    parser.add_argument("--size", default="tiny", help="of the presets")
    parser.add_argument("--out", type=pathlib.Path, default=ROWS)
    args = parser.parse_args()
    from atlasjax.presets import ARCHITECTURES

    done = {(row["model"], row["batch"], row["prompt"], row["size"]) for row in read_rows(args.out)}
    for prompt in PROMPTS if args.size == "tiny" else PROMPTS[-1:]:
        for name in ARCHITECTURES if args.all else args.only:
            for batch in BATCHES:
                if (name, batch, prompt, args.size) not in done:
                    row = measure(name, batch, prompt, args.size)
                    append_row(args.out, row)
                    print(row, flush=True)


if __name__ == "__main__":
    main()
