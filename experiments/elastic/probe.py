"""Changes the read of a trained model with an elastic memory: E Table 5 and E Table 7 on any run.

    python -m experiments.elastic.probe train runs/elastic-small                 # a small run to try it on, minutes on a CPU
    python -m experiments.elastic.probe sampling runs/elastic-small              # another sampling at test time
    python -m experiments.elastic.probe corrupt runs/elastic-small               # random tokens in the local context

`sampling` evaluates the run's held-out text with every sampling and several numbers of samples, without any training. `corrupt`
replaces inputs of the last block of each held-out sequence by random tokens, each with probability p, and computes the loss of
the last block over the tokens that were kept (targets are never replaced): once with the past, and once with a document boundary
before the block, which removes the memory (and the windows of other layers). If the memory compensates for the local context, the
gain from the past grows with p. E §3.6 instead replaces keys and values of the block by noise. A run is a folder written by
`atlasjax train`. Rows are also written to <run>/probe_<command>.jsonl.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np


def small_model() -> Any:
    """Four layers, the third with memory, blocks of 64 bytes."""
    from atlasjax.nn import AttentionConfig, ElasticConfig, ModelConfig

    return ModelConfig(
        dim=128, num_layers=4, num_heads=4, mixer=("swa", "swa", "elastic", "swa"), attention=AttentionConfig(window=64),
        elastic=ElasticConfig(order=64, block_size=64, context=512), dtype="float32", remat=False,
    )  # fmt: skip


def train(run_dir: pathlib.Path, steps: int, sampling: str) -> None:
    """Trains the small model on the embedded text, in sequences of eight blocks."""
    from atlasjax.data.config import DataConfig
    from atlasjax.distributed.mesh import MeshConfig
    from atlasjax.train.config import OptimizerConfig, TrainConfig
    from atlasjax.train.loop import train as run

    model = small_model()
    config = TrainConfig(
        model=dataclasses.replace(model, elastic=dataclasses.replace(model.elastic, sampling=sampling)),
        data=DataConfig(sequence_length=512, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=max(1, steps // 10)), mesh=MeshConfig(data=1), steps=steps,
        run_dir=str(run_dir), tensorboard=False,
    )  # fmt: skip
    run(config)


class Run:
    """A trained run: its parameters, and its held-out sequences."""

    def __init__(self, run_dir: pathlib.Path):
        from flax import nnx

        from atlasjax.train import state as state_lib
        from atlasjax.train.load import load_run

        loaded = load_run(run_dir)
        self.config, self.tokenizer = loaded.config, loaded.tokenizer
        if "elastic" not in self.config.model.pattern:
            raise SystemExit(f"{run_dir}: its mixer is {self.config.model.mixer!r}; it should have an 'elastic' one.")
        self.params = state_lib.pure(nnx.split(loaded.model, nnx.Param)[1])

    def graphdef(self, **changes: Any) -> Any:
        """The model with a different `ElasticConfig` for the same parameters."""
        from atlasjax.train import state as state_lib

        elastic = dataclasses.replace(self.config.model.elastic, **changes)
        return state_lib.model_shapes(dataclasses.replace(self.config.model, elastic=elastic))[0]

    def batches(self, count: int) -> Iterator[dict[str, np.ndarray]]:
        """Held-out batches."""
        from atlasjax.data.pipeline import make_pipeline

        yield from itertools.islice(make_pipeline(self.config.data, self.tokenizer, "validation"), count)

    def bits_per_byte(self, batches: int, **changes: Any) -> float:
        """Bits per byte on held-out text."""
        import jax

        from atlasjax.data.pipeline import make_pipeline
        from atlasjax.evaluate.lm import evaluate
        from atlasjax.train.step import eval_sums

        pipeline = make_pipeline(self.config.data, self.tokenizer, "validation")
        table = self.tokenizer.bytes_per_token
        step = jax.jit(eval_sums(self.graphdef(**changes), table, max_segments=pipeline.max_segments))
        return evaluate(step, self.params, pipeline, max_batches=batches).bits_per_byte


def swap_sampling(run: Run, batches: int) -> Iterator[dict[str, Any]]:
    """Held-out bits per byte by sampling and number of samples."""
    from atlasjax.mixers.elastic.sampling import SAMPLINGS

    trained = run.config.model.elastic
    most = trained.samples or trained.order
    for samples in [n for n in (most, most // 2, most // 4) if n]:
        for sampling in SAMPLINGS:
            changes = {"sampling": sampling, "samples": samples, "alpha": None}
            if sampling == trained.sampling:
                changes["alpha"] = trained.alpha
            bits = run.bits_per_byte(batches, **changes)
            is_trained = sampling == trained.sampling and samples == most
            yield {"sampling": sampling, "samples": samples, "as trained": is_trained, "bits per byte": round(bits, 4)}


def corrupt_local_context(run: Run, batches: int, rates: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Loss of the last block in nats per kept token, with and without the past, by corruption rate."""
    import jax
    import jax.numpy as jnp
    import optax

    from atlasjax.train import state as state_lib

    graphdef, size = run.graphdef(), run.config.model.elastic.block_size
    length = run.config.data.sequence_length
    start = (length - 1) // size * size
    if not start:
        raise SystemExit(f"sequences of {length} tokens are one block of {size}: there is no memory to read.")

    @jax.jit
    def loss(params: Any, inputs: jax.Array, targets: jax.Array, kept: jax.Array, ids: jax.Array) -> jax.Array:
        logits = state_lib.merge(graphdef, params)(inputs, ids, 2)[:, start:]
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets[:, start:]) * kept[:, start:])

    rows = list(run.batches(batches))
    if any("segment_ids" in row for row in rows):
        raise SystemExit("the run's sequences are packed documents; corrupt needs contiguous text (data.packing).")
    for rate in rates:
        rng, sums, count = np.random.default_rng(0), {"with the past": 0.0, "without": 0.0}, 0
        for row in rows:
            inputs, local = np.array(row["inputs"]), np.arange(length) >= start
            replaced = (rng.random(inputs.shape) < rate) & local
            inputs[replaced] = rng.integers(0, run.config.model.vocab_size, int(replaced.sum()))
            kept = (local & ~replaced & (row["weights"] > 0)).astype(np.float32)
            count += int(kept.sum())
            for name, ids in (("with the past", np.zeros_like(inputs)), ("without", np.zeros_like(inputs) + local)):
                sums[name] += float(loss(run.params, inputs, row["targets"], kept, ids.astype(np.int32)))
        means = {name: round(total / count, 4) for name, total in sums.items()}
        gain = round(means["without"] - means["with the past"], 4)
        yield {"corrupted": rate, "tokens": count, **means, "gain from the past": gain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "sampling", "corrupt"))
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=400, help="of train")
    parser.add_argument("--sampling", default="exponential", help="of train")
    parser.add_argument("--batches", type=int, default=16, help="of held-out text")
    parser.add_argument("--rates", type=float, nargs="+", default=(0.0, 0.25, 0.5, 0.75, 0.9))
    options = parser.parse_args()
    if options.command == "train":
        train(options.run_dir, options.steps, options.sampling)
        return
    run = Run(options.run_dir)
    if options.command == "sampling":
        rows = swap_sampling(run, options.batches)
    else:
        rows = corrupt_local_context(run, options.batches, tuple(options.rates))
    with (options.run_dir / f"probe_{options.command}.jsonl").open("w") as file:
        for number, row in enumerate(rows):
            if not number:
                print("| " + " | ".join(row) + " |\n|" + " --- |" * len(row))
            print("| " + " | ".join(str(x) for x in row.values()) + " |", flush=True)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
