"""One measured tiny training run, which the zoo and the ablation repeat for each model."""

import dataclasses
import statistics
import time
from typing import Any

from atlasjax.nn import ModelConfig
from experiments.zoo import corpora
from experiments.zoo.corpora import CORPORA


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all models of a table.

    Attributes:
      steps: number of optimizer steps.
      batch_size: sequences per step.
      sequence_length: tokens (bytes) per sequence.
      learning_rate: peak rate of AdamW for all models, with warm-up over a tenth of the steps and cosine decay to a tenth of the
        peak.
      eval_batches: batches of held-out text, as large as those of training. None means all.
      text: a text file, or a name of `corpora.CORPORA`. None means the embedded text.
      seed: seed of parameters and data order.
    """

    steps: int = 80
    batch_size: int = 4
    sequence_length: int = 256
    learning_rate: float = 4e-3
    eval_batches: int | None = 16
    text: str | None = None
    seed: int = 0


def train_config(model: ModelConfig, recipe: Recipe) -> Any:
    """The run as in `atlasjax train`."""
    from atlasjax.data.config import DataConfig
    from atlasjax.distributed.mesh import MeshConfig
    from atlasjax.train.config import OptimizerConfig, TrainConfig

    source: dict[str, Any] = {} if recipe.text is None else {"source": "text", "paths": (recipe.text,)}
    if recipe.text in CORPORA:
        source = {"source": corpora.source(recipe.text)}
    data = DataConfig(sequence_length=recipe.sequence_length, batch_size=recipe.batch_size, seed=recipe.seed, **source)
    optimizer = OptimizerConfig(learning_rate=recipe.learning_rate, warmup_steps=max(1, recipe.steps // 10))
    return TrainConfig(
        model=model, data=data, optimizer=optimizer, mesh=MeshConfig(data=1), steps=recipe.steps, seed=recipe.seed
    )


def measure(model: ModelConfig, recipe: Recipe, *, progress: str | None = None) -> tuple[dict[str, Any], Any]:
    """Trains a model on one device and evaluates it on held-out text.

    Args:
      model: the architecture.
      recipe: all other settings.
      progress: name under which progress is reported. None means silent.

    Returns:
      ({bits_per_byte, the numbers of `train`, total seconds}, the trained parameters).

    Raises:
      FloatingPointError: the loss of a step is not finite.
    """
    started = time.perf_counter()
    result, params = train(train_config(model, recipe), progress=progress)
    bits_per_byte = round(held_out(model, params, recipe), 4)
    return {"bits_per_byte": bits_per_byte, **result, "seconds": round(time.perf_counter() - started, 1)}, params


def train(config: Any, *, progress: str | None = None) -> tuple[dict[str, Any], Any]:
    """Trains a run on one device, without checkpoints and evaluations.

    Args:
      config: the run.
      progress: name under which progress is reported. None means silent.

    Returns:
      ({final_training_loss: that of the last ten steps in nats per token, tokens_per_second of the median training step,
      compile_seconds, tokens}, the trained parameters).

    Raises:
      FloatingPointError: the loss of a step is not finite.
    """
    import jax
    import numpy as np

    from atlasjax.distributed.sharding import global_batch
    from atlasjax.train.setup import prepare
    from atlasjax.train.step import jit_train_step

    setup = prepare(config)
    state, data = setup.init_state(), iter(setup.train_data)
    batch = global_batch(next(data), setup.mesh)
    step = jit_train_step(setup.graphdef, setup.optimizer, setup.schedule, setup.shardings, setup.mesh)
    before = time.perf_counter()
    step = step.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - before
    losses, seconds = [], []
    for number in range(1, config.steps + 1):
        before = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - before)
        if not np.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss of step {number} is {losses[-1]}")
        if number < config.steps:
            batch = global_batch(next(data), setup.mesh)
        if progress and (number % 20 == 0 or number == config.steps):
            print(f"{progress}: step {number}/{config.steps}, loss {losses[-1]:.3f}", flush=True)
    tokens = config.data.batch_size * config.data.sequence_length
    return {
        "final_training_loss": round(float(np.mean(losses[-10:])), 4),
        "tokens_per_second": round(tokens / statistics.median(seconds)),
        "compile_seconds": round(compile_seconds, 1),
        "tokens": tokens * config.steps,
    }, jax.device_get(state.params)


def held_out(model: ModelConfig, params: Any, recipe: Recipe) -> float:
    """Bits per byte on held-out text, for parameters in the form of `TrainState.params`. `model` may differ from the trained one in
    settings without parameters (Newton–Schulz steps, window, …)."""
    import jax

    from atlasjax.evaluate.lm import evaluate
    from atlasjax.train.setup import prepare
    from atlasjax.train.step import eval_sums

    setup = prepare(train_config(model, recipe))
    assert setup.validation_data is not None
    run = jax.jit(eval_sums(setup.graphdef, setup.tokenizer.bytes_per_token))
    return evaluate(run, params, setup.validation_data, max_batches=recipe.eval_batches).bits_per_byte
