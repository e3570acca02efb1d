"""The row of one model and seed: it is trained once, and tested as each direction needs."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
import optax

from atlasjax.nn import ModelConfig
from experiments.rows import Row, at_least_one
from experiments.studies.corruption import corrupted
from experiments.studies.models import BLOCK, LENGTH, model
from experiments.studies.reconstruction import reconstruction
from experiments.zoo import training

RATES = (0.25, 0.5, 0.75)  # E Table 7
SAMPLINGS = ("exponential", "uniform")
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all rows of a file.

    Attributes:
      steps: number of optimizer steps.
      batch_size: sequences per step, of 512 bytes each.
      learning_rate: peak rate of AdamW; warm-up over a tenth of the steps, cosine decay to a tenth of the peak.
      eval_batches: batches of held-out text. None: all of it.
      text: name and hash of the text (`rows.text_identity`). None: the embedded text.

    Raises:
      ValueError: a number is out of range.
    """

    steps: int = 400
    batch_size: int = 4
    learning_rate: float = 4e-3
    eval_batches: int | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        at_least_one(self, "studies", ("steps", "batch_size", "eval_batches"))
        if not self.learning_rate > 0:
            raise ValueError(f"studies: learning_rate must be above 0, got {self.learning_rate}.")

    def run(self, seed: int, text: str | None) -> training.Recipe:
        """The training run of a seed. `text`: a file, or None for the embedded text."""
        return training.Recipe(**{**dataclasses.asdict(self), "text": text}, sequence_length=LENGTH, seed=seed)


def measure(name: str, seed: int, recipe: Recipe, text: str | None = None) -> Row:
    """Trains a model of `models.MODELS` and tests it on held-out text.

    Returns:
      The row: model, seed, the numbers of `training.measure` and of `tested`, parameters, memory_floats, recipe.

    Raises:
      ValueError: no such model, or a text that cannot be read.
      FloatingPointError: the loss of a step is not finite.
    """
    from atlasjax.nn.abstract import count_parameters
    from atlasjax.train.setup import prepare

    config, run = model(name), recipe.run(seed, text)
    result, params = training.measure(config, run, progress=f"{name}, seed {seed}")
    held_out = prepare(training.train_config(config, run)).validation_data
    assert held_out is not None
    return {
        "model": name,
        "seed": seed,
        **result,
        **tested(config, params, list(itertools.islice(held_out, recipe.eval_batches)), BLOCK),
        "parameters": count_parameters(config),
        "memory_floats": memory_floats(config),
        "recipe": dataclasses.asdict(recipe),
    }


def tested(config: ModelConfig, params: Any, batches: list[Batch], block: int) -> Row:
    """The tests of a trained model.

    Args:
      config: the model.
      params: its parameters, in the form of `TrainState.params`.
      batches: held-out text, inputs and targets [batch, time] of contiguous text.
      block: tokens per block.

    Returns:
      by_block: bits per token of each block of the sequences. With an elastic memory by_sampling: bits per token if it is read with
      each of `SAMPLINGS`, and reconstruction: what its coefficients lose of keys and values. With attention within blocks in all
      layers corrupted: bits per token of the last block with noise in its keys and values, in the "memory" layer or in "all"
      layers, then by rate.

    Raises:
      ValueError: the sequences are not two or more whole blocks.
    """
    time = batches[0]["inputs"].shape[1]
    if time % block or time < 2 * block:
        raise ValueError(f"studies: sequences of {time} tokens are not two or more whole blocks of {block}.")
    clean = bits(config, params, batches, block)
    row: Row = {"by_block": [_round(x) for x in clean]}
    if "elastic" in config.pattern:
        read = lambda name: dataclasses.replace(
            config, elastic=dataclasses.replace(config.elastic, sampling=name, alpha=None)
        )
        row["by_sampling"] = {name: _round(np.mean(bits(read(name), params, batches, block))) for name in SAMPLINGS}
        row["reconstruction"] = {name: _round(x) for name, x in reconstruction(config, params, batches).items()}
    place = memory_layer(config)
    if place is not None:
        start = (len(clean) - 1) * block
        every = tuple(range(len(config.pattern)))
        row["corrupted"] = {
            where: {
                str(rate): _round(bits(corrupted(config, rate, start, layers), params, batches, block)[-1])
                for rate in RATES
            }
            for where, layers in (("memory", (place,)), ("all", every))
        }
    return row


def bits(config: ModelConfig, params: Any, batches: list[Batch], block: int) -> np.ndarray:
    """Bits per token of each block, the mean over sequences: float64 [time / block]. `config` may differ from the trained one in
    settings without parameters."""
    total, count = sums(config, params, batches, block)
    return total / count


def sums(config: ModelConfig, params: Any, batches: list[Batch], block: int) -> np.ndarray:
    """Bits and tokens of each block, summed over sequences: float64 [2, time / block]. Padding counts as nothing."""
    from atlasjax.train import state as state_lib

    graphdef = state_lib.model_shapes(config)[0]

    @jax.jit
    def losses(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits = state_lib.merge(graphdef, params)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    found = [
        np.stack([(np.asarray(losses(params, b["inputs"], b["targets"])) * b["weights"]).sum(0), b["weights"].sum(0)])
        for b in batches
    ]
    nats, count = np.sum(found, axis=0, dtype=np.float64).reshape(2, -1, block).sum(-1)
    return np.stack([nats / math.log(2), count])


def memory_layer(config: ModelConfig) -> int | None:
    """The place of the memory in a pattern of attention within blocks, or of a layer in its stead; None for other models."""
    if not set(config.pattern) <= {"block_attention", "elastic", "memorizing"}:
        return None
    return next(
        (i for i, name in enumerate(config.pattern) if name != "block_attention"),
        round(len(config.pattern) * 3 / 4) - 1,
    )


def memory_floats(config: ModelConfig) -> int | None:
    """Numbers that the memory layer keeps of earlier blocks; None for models without attention within blocks."""
    place = memory_layer(config)
    if place is None:
        return None
    kept = {"elastic": config.elastic.order, "memorizing": config.memorizing.queue_length, "block_attention": 0}
    return kept[config.pattern[place]] * config.num_heads * (config.resolved_head_dim + config.value_dim)


def _round(x: Any) -> float:
    return round(float(x), 4)
