"""Reading and continuing texts on this machine: prefill beside the forward pass, transformers' own Mamba-2, and 16-bit models.

    python -m experiments.benchmarks.generation_cpu prefill            # prefill over forward pass, each architecture at size tiny
    python -m experiments.benchmarks.generation_cpu peer               # Mamba-2 of 51M parameters: transformers and this library
    python -m experiments.benchmarks.generation_cpu sixteen            # the same model in bfloat16 over float32, and its caches
    python -m experiments.benchmarks.generation_cpu prefill --only titans atlas --tokens 512

Models with parameters as they are initialized. What a row compares runs in turn in one process, `--repeats` times, and the least
times are compared: only ratios within one row are meaningful. Each has the seconds of the wall clock, the processor seconds, and
those of the busiest thread, which are what the wall clock would say if nothing else ran. A stopped command goes on with the row
where it was; rows are in generation_cpu.jsonl.
"""

import argparse
import dataclasses
import os
import pathlib
import time

from experiments.benchmarks.decoding_cpu import MAIN, copy_rate
from experiments.rows import append_row, read_rows

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROWS = pathlib.Path(__file__).with_suffix(".jsonl")
TOKENS = (512, 2048)
BATCHES, DECODED = (1, 8), 32
PEER = {"dim": 512, "layers": 20, "vocabulary": 32000, "state": 128, "head": 64}  # 50.8M parameters


def thread_seconds():
    """Processor seconds of each thread of this process."""
    found = {}
    for thread in pathlib.Path("/proc/self/task").iterdir():
        try:
            found[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue  # it has ended
    return found


def measured(functions, repeats):
    """name → the least {"wall", "processor", "busiest"} seconds of functions that run in turn, after one run of each."""
    best = {name: {"wall": float("inf"), "processor": float("inf"), "busiest": float("inf")} for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            before, processor, wall = thread_seconds(), time.process_time(), time.perf_counter()
            function()
            took = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
            took["busiest"] = max(now - before.get(thread, 0.0) for thread, now in thread_seconds().items())
            best[name] = {kind: min(best[name][kind], took[kind]) for kind in took}
    return best


def ours(config):
    """The functions that are measured, of a model of this library."""
    import jax
    import numpy as np
    from flax import nnx

    from atlasjax.generate import SamplingConfig, generate, read
    from atlasjax.nn import LanguageModel

    model = LanguageModel(config, rngs=nnx.Rngs(0))
    wait = jax.block_until_ready

    def decode(tokens, batch):
        context = read(model, tokens, max_length=tokens.shape[1] + DECODED).rows(np.zeros(batch, int))
        greedy = SamplingConfig(temperature=0.0)
        return lambda: wait(generate(model, None, DECODED, context=context, config=greedy)), context

    params = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return (lambda tokens: wait(model(tokens))), (lambda tokens: wait(read(model, tokens).logits)), decode, params


def peer_config(dtype="float32"):
    from atlasjax.nn import ModelConfig, SSMConfig

    return ModelConfig(
        mixer="mamba2", num_heads=1, ffn="none", tie_embeddings=True, vocab_size=PEER["vocabulary"], dim=PEER["dim"],
        num_layers=PEER["layers"], ssm=SSMConfig(state_dim=PEER["state"], head_dim=PEER["head"], groups=1), dtype=dtype,
    )  # fmt: skip


def prompts(count):
    import numpy as np

    return np.random.default_rng(0).integers(32, 127, (1, count))


def prefill(name, tokens, repeats):
    """A row: the forward pass and the prefill of one architecture."""
    from atlasjax.presets import get_preset

    config = dataclasses.replace(get_preset(f"{name}-tiny"), dtype="float32")
    if config.max_positions is not None:
        config = dataclasses.replace(config, max_positions=max(config.max_positions, tokens))
    forward, read, *_ = ours(config)
    text = prompts(tokens)
    found = measured({"forward": lambda: forward(text), "prefill": lambda: read(text)}, repeats)
    return found | {"prefill_speed_over_forward": found["forward"]["busiest"] / found["prefill"]["busiest"]}


def transformers_model():
    import torch
    import transformers

    inner = 2 * PEER["dim"]
    config = transformers.Mamba2Config(
        num_heads=inner // PEER["head"], head_dim=PEER["head"], vocab_size=PEER["vocabulary"], hidden_size=PEER["dim"],
        state_size=PEER["state"], num_hidden_layers=PEER["layers"], expand=2, n_groups=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Mamba2ForCausalLM(config).eval()


def greedy_loop(model, tokens):
    """A function that decodes with transformers after a prompt that has been read, as `generate` does."""
    import torch

    with torch.no_grad():
        read = model(tokens, use_cache=True)
    token = read.logits[:, -1:].argmax(-1)

    def run():
        now = token
        for _ in range(DECODED):
            now = model(now, cache_params=read.cache_params, use_cache=True).logits.argmax(-1)

    return run


def peer(what, size, repeats):
    """A row: one quantity of transformers' Mamba-2 and of this library's. size: tokens, or the batch of "decode"."""
    import torch

    theirs = transformers_model()
    forward, read, decode, params = ours(peer_config())
    text = prompts(16 if what == "decode" else size)
    batch = size if what == "decode" else 1
    tokens = torch.tensor(text).repeat(batch, 1)
    more = {}
    if what == "decode":
        mine, context = decode(text, batch)
        run = greedy_loop(theirs, tokens)
        more = {"param_bytes": params, "state_bytes": context.num_bytes // batch}
    else:
        mine = lambda: (forward if what == "forward" else read)(text)
        kept = {"use_cache": False} if what == "forward" else {"use_cache": True, "logits_to_keep": 1}
        run = lambda: theirs(tokens, **kept)
    with torch.no_grad():
        found = measured({"transformers": run, "ours": mine}, repeats)
    if what == "decode":
        moved = params + 2 * batch * more["state_bytes"]
        more["bound_seconds"] = DECODED * moved / copy_rate()
    return found | more | {"speed_over_transformers": found["transformers"]["busiest"] / found["ours"]["busiest"]}


def sixteen(what, size, repeats):
    """A row: one quantity of the peer's model in float32 and in bfloat16, both by this library."""
    functions = {}
    for dtype in ("float32", "bfloat16"):
        forward, read, decode, _ = ours(peer_config(dtype))
        text = prompts(16 if what == "decode" else size)
        one = {"forward": forward, "prefill": read}
        functions[dtype] = decode(text, size)[0] if what == "decode" else lambda f=one[what], text=text: f(text)
    found = measured(functions, repeats)
    return found | {"bfloat16_speed_over_float32": found["float32"]["busiest"] / found["bfloat16"]["busiest"]}


def cases(args):
    """(key of a row, function that measures it) of a command."""
    if args.command == "prefill":
        return [({"model": name, "tokens": n}, prefill, (name, n)) for n in args.tokens for name in args.only]
    measure = peer if args.command == "peer" else sixteen
    whats = [(what, n) for what in ("forward", "prefill") for n in args.tokens] + [("decode", n) for n in BATCHES]
    return [({"what": what, "size": n}, measure, (what, n)) for what, n in whats if what in args.what]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prefill", "peer", "sixteen"))
    parser.add_argument("--only", nargs="*", default=MAIN, metavar="ARCHITECTURE", help="of prefill")
    parser.add_argument("--what", nargs="*", default=("forward", "prefill", "decode"), help="of peer and sixteen")
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=ROWS)
    args = parser.parse_args()
    done = read_rows(args.out)
    for key, measure, arguments in cases(args):
        key = {"command": args.command} | key
        if not any(key.items() <= row.items() for row in done):
            row = key | measure(*arguments, args.repeats)
            append_row(args.out, row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
