"""The loop that samples tokens, compiled ahead of time for a TPU or a GPU: what it keeps and what it needs. No such chip is needed.

    python -m experiments.benchmarks.decoding_tpu                              # the rows of decoding_tpu.jsonl that are missing
    python -m experiments.benchmarks.decoding_tpu --models atlas-340m --batch 32 --tokens 2048 --chip v6e:2x2 --out /tmp/rows.jsonl

The compiler's figures for one chip. State: what the model holds of the texts. Temporaries: what a call needs besides its arguments,
such as copies of the state in another layout. The state is donated: a call returns it in the same memory. Nothing is run, so
nothing here is a speed. `docs/generate.py` makes the table.
"""

import argparse
import json
import operator
import os
import pathlib

from experiments import timing
from experiments.rows import add_missing

ROWS = pathlib.Path(__file__).with_suffix(".jsonl")
MODELS = (
    "transformer++-340m", "gla-340m", "gated-deltanet-340m", "mamba2-340m", "log-linear-340m", "gam-340m", "elastic-exp-340m",
    "ttt-mlp-340m", "titans-340m", "titans-mac-340m", "titans-mag-340m", "dla-340m", "omeganet-340m", "atlas-340m",
    "atlas-mag-340m", "titans-grm-340m", "deep-transformer-340m",
)  # fmt: skip
SAMPLED = 64
KEY = ("model", "chip", "batch", "tokens")


def measure(preset: str, chip: str, batch: int, tokens: int) -> dict:
    """The row of one model on one device of a topology."""
    from atlasjax.plan.topology import Topology

    topology = Topology.parse(chip)
    device = topology.devices()[0]
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from atlasjax.generate import SamplingConfig, streams
    from atlasjax.nn import LanguageModel
    from atlasjax.presets import get_preset

    config = get_preset(preset)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))), nnx.Param)
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
    cache = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_cache(batch, tokens), params)
    logits = jax.ShapeDtypeStruct((batch, config.vocab_size), jnp.float32)
    key, start = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.int32)
    arguments = jax.tree.map(place, (params, logits, cache, None, key, start))
    options = {"config": SamplingConfig(), "length": SAMPLED, "vocab_size": None}
    with jax.sharding.use_abstract_mesh(jax.sharding.Mesh([device], "one").abstract_mesh):
        lowered = streams._decode.lower(graphdef, *arguments, **options)
    compiled = lowered.compile(topology.compiler.options())
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return {
        "model": preset, "chip": chip, "batch": batch, "tokens": tokens, "param_bytes": size(params), "state_bytes": size(cache),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes, "total_bytes": timing.program_bytes(compiled),
        "available_bytes": int(topology.accelerator.memory_gib * 2**30),
    }  # fmt: skip


def in_child(row: tuple[str, str, int, int]) -> dict:
    """`measure` in a process of its own, which the compiler may end. A row that says why, if it fails."""
    from atlasjax.plan import cuda, libtpu

    variables = {**os.environ, **cuda.environment(), **libtpu.environment()}
    done = timing.child("experiments.benchmarks.decoding_tpu", "--one", *row, env=variables)
    if done.returncode == 0:
        return timing.last_line(done)
    reason = [line for line in done.stderr.splitlines() if "RESOURCE_EXHAUSTED" in line or "Error" in line]
    return {**dict(zip(KEY, row, strict=True)), "error": (reason or ["no message"])[-1][:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="PRESET")
    parser.add_argument("--chip", default="v5e:2x2", help="a topology, of which one device is used")
    parser.add_argument("--batch", type=int, default=8, help="texts that are continued at once")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each text for which there is room")
    parser.add_argument("--out", type=pathlib.Path, default=ROWS)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        preset, chip, batch, tokens = args.one
        print(json.dumps(measure(preset, chip, int(batch), int(tokens))))
        return
    wanted = [(model, args.chip, args.batch, args.tokens) for model in args.models]
    add_missing(args.out, operator.itemgetter(*KEY), wanted, in_child)


if __name__ == "__main__":
    main()
