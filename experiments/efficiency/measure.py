"""The row of a model and a length: its training step, or its decoding, timed in turn with Transformer++'s."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from experiments.rows import Row, at_least_one

REFERENCE = "transformer++"
# The main rows of the papers' comparisons of speed: M Figure 4, A's rules, E Table 8, G Table 2.
MODELS = (
    "swa", "gla", "gated-deltanet", "titans", "titans-residual", "titans-grm", "titans-soup", "titans-ssc", "dla", "omeganet",
    "atlas", "elastic-exp", "memorizing", "infini", "melodi", "gam", "gam-transformer", "mamba",
)  # fmt: skip
KINDS = ("training", "decoding")
DECODED = 64  # tokens that are sampled after a text


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all rows of a file.

    Attributes:
      size: of the presets.
      tokens: of a training step: so many sequences of a length, at least one.
      decoded_rows: sequences that are decoded together.
      rounds: timed rounds, after one that is not counted.
      most_gib: a training step that needs more temporary memory is not run.

    Raises:
      ValueError: a number is out of range.
    """

    size: str = "tiny"
    tokens: int = 8192
    decoded_rows: int = 1
    rounds: int = 5
    most_gib: float = 8.0

    def __post_init__(self) -> None:
        at_least_one(self, "efficiency", ("tokens", "decoded_rows", "rounds"))


@dataclasses.dataclass(frozen=True)
class Program:
    """A call that is timed.

    Attributes:
      run: does it once and waits. None: it needs too much memory.
      tokens: that it reads or writes.
      temporary_bytes: of a training step, as the compiler counts them.
    """

    run: Callable[[], None] | None
    tokens: int
    temporary_bytes: int | None = None


def config_of(name: str, length: int, recipe: Recipe) -> Any:
    """A preset, with learned positions for the length if it has any."""
    from atlasjax.presets import get_preset

    config = get_preset(f"{name}-{recipe.size}")
    if config.max_positions is None:
        return config
    return dataclasses.replace(config, max_positions=max(config.max_positions, length + DECODED))


def program(kind: str, name: str, length: int, recipe: Recipe) -> Program:
    """A training step on sequences of a length, or the decoding of `DECODED` tokens after a text of that length."""
    config = config_of(name, length, recipe)
    return _training(config, length, recipe) if kind == "training" else _decoding(config, length, recipe)


def _training(config: Any, length: int, recipe: Recipe) -> Program:
    import jax

    from atlasjax.data.config import DataConfig
    from atlasjax.distributed.mesh import MeshConfig
    from atlasjax.distributed.sharding import global_batch
    from atlasjax.train.config import TrainConfig
    from atlasjax.train.setup import prepare
    from atlasjax.train.step import jit_train_step

    data = DataConfig(
        sequence_length=length, batch_size=max(1, recipe.tokens // length), validation_fraction=0
    )  # any text: its tokens are bytes
    setup = prepare(TrainConfig(model=config, data=data, mesh=MeshConfig(data=1)))
    state, batch = setup.init_state(), global_batch(next(iter(setup.train_data)), setup.mesh)
    jitted = jit_train_step(setup.graphdef, setup.optimizer, setup.schedule, setup.shardings, setup.mesh)
    step = jitted.lower(state, batch).compile()
    tokens, needed = data.batch_size * length, step.memory_analysis().temp_size_in_bytes
    if needed > recipe.most_gib * 2**30:
        return Program(None, tokens, needed)
    states = [state]  # a step takes the state's memory

    def run() -> None:
        states[0], metrics = step(states[0], batch)
        jax.block_until_ready(metrics)

    return Program(run, tokens, needed)


def _decoding(config: Any, length: int, recipe: Recipe) -> Program:
    import jax
    import numpy as np
    from flax import nnx

    from atlasjax.generate import generate, read
    from atlasjax.nn import LanguageModel

    model = LanguageModel(config, rngs=nnx.Rngs(0))
    text = np.random.default_rng(0).integers(32, 127, (1, length))
    context = read(model, text, max_length=length + DECODED).rows(np.zeros(recipe.decoded_rows, int))
    run = lambda: jax.block_until_ready(generate(model, None, DECODED, context=context))
    return Program(run, DECODED * recipe.decoded_rows)


def timed(one: Program, other: Program, rounds: int) -> tuple[list[float] | None, list[float] | None]:
    """Seconds of each round, the two programs in turn; None for one that needs too much memory."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        # The order changes, so that a slow moment of the machine meets both.
        for i in (0, 1) if number % 2 else (1, 0):
            run = (one, other)[i].run
            if run is None:
                continue
            started = time.perf_counter()
            run()
            if number:  # the first round warms up
                seconds[i].append(round(time.perf_counter() - started, 5))
    return seconds[0] or None, seconds[1] or None


def measure(kind: str, name: str, length: int, recipe: Recipe, reference: Program) -> Row:
    """The row: kind, model, length, tokens, seconds and reference_seconds of each round (None: too much memory),
    temporary_bytes and those of the reference, parameters, device, recipe."""
    import jax

    from atlasjax.nn.abstract import count_parameters

    own = program(kind, name, length, recipe)
    seconds, others = timed(own, reference, recipe.rounds)
    device = jax.devices()[0]
    return {
        "kind": kind, "model": name, "length": length, "tokens": own.tokens, "seconds": seconds, "reference_seconds": others,
        "temporary_bytes": own.temporary_bytes, "reference_temporary_bytes": reference.temporary_bytes,
        "parameters": count_parameters(config_of(name, length, recipe)), "device": f"{device.platform}: {device.device_kind}",
        "recipe": dataclasses.asdict(recipe),
    }  # fmt: skip
