"""The parts of a training step, from a config and a mesh: the model, the optimizer, the parameters that train, the shardings."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from atlasjax.train import state as state_lib
from atlasjax.train.config import TrainConfig
from atlasjax.train.optimizer import check_optimizer, learning_rate, run_optimizer
from atlasjax.train.state import TrainState
from atlasjax.train.step import jit_train_step
from atlasjax.train.trainable import select, trainable_mask

# For a program that runs once: compiling it takes longer than running it. The numbers are the same.
_ONCE = {"xla_backend_optimization_level": 1}


@dataclasses.dataclass(frozen=True)
class Learner:
    """The parts of a training step, before any parameter is made.

    Attributes:
      config: the run's configuration.
      mesh: the devices.
      graphdef: the model's definition.
      shapes: of its parameters, a nested dict.
      optimizer: clipping and AdamW.
      trainable: which parameters train (`trainable_mask`). None: all.
      schedule: step → learning rate.
      shardings: the shardings of the TrainState.
      skipped: one line for each mesh axis that a parameter could not be split over.
    """

    config: TrainConfig
    mesh: Mesh
    graphdef: nnx.GraphDef
    shapes: PyTree
    optimizer: optax.GradientTransformation
    trainable: PyTree | None
    schedule: Callable[[jax.Array | int], jax.Array]
    shardings: TrainState
    skipped: list[str]

    @property
    def has_ema(self) -> bool:
        """Whether the state has a moving average of the parameters."""
        return self.config.optimizer.ema_decay is not None

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the TrainState."""
        return state_lib.abstract_state(
            self.config.model, self.optimizer, self.shardings, self.trainable, ema=self.has_ema
        )

    def init_state(self) -> TrainState:
        """The initial TrainState from the config's seed. Every array is made on the devices that hold it."""
        init = jax.jit(
            lambda key: state_lib.init_state(self.config.model, self.optimizer, key, self.trainable, ema=self.has_ema),
            out_shardings=self.shardings,
            compiler_options=_ONCE if self.mesh.devices.flat[0].platform == "cpu" else None,
        )
        return init(jax.random.key(self.config.seed))

    def state_from(self, params: PyTree) -> TrainState:
        """The initial TrainState with given parameters, which are donated."""
        init = jax.jit(
            lambda params, key: state_lib.state_from(params, self.optimizer, key, self.trainable, ema=self.has_ema),
            out_shardings=self.shardings,
            donate_argnums=0,
        )
        return init(params, jax.random.key(self.config.seed))

    def step_arguments(self, max_segments: int | None) -> dict[str, Any]:
        """The arguments of `step.train_step` beside the state and the batch, whose rows have at most so many segments."""
        return {
            "graphdef": self.graphdef,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "microbatches": self.config.accumulation,
            "max_segments": max_segments,
            "loss": self.config.loss,
            "trainable": self.trainable,
            "ema_decay": self.config.optimizer.ema_decay,
        }

    def jit_step(self, max_segments: int | None) -> jax.stages.Wrapped:
        """The jitted (state, batch) → (state, metrics) of `step.jit_train_step`."""
        return jit_train_step(shardings=self.shardings, mesh=self.mesh, **self.step_arguments(max_segments))


def make_learner(config: TrainConfig, mesh: Mesh) -> Learner:
    """The parts of a config's training step on a mesh. Makes no arrays, and compiles nothing.

    Raises:
      ValueError: no parameter trains, or the optimizer or its schedule cannot be used.
    """
    graphdef, shapes = state_lib.model_shapes(config.model)
    trainable = trainable_mask(config.optimizer.trainable, shapes)
    optimizer = run_optimizer(config, trainable)
    check_optimizer(config.optimizer, optimizer, select(shapes, trainable))
    ema = config.optimizer.ema_decay is not None
    shardings, skipped = state_lib.state_shardings(config.model, optimizer, mesh, trainable, ema=ema)
    schedule = learning_rate(config.optimizer, config.steps)
    return Learner(config, mesh, graphdef, shapes, optimizer, trainable, schedule, shardings, skipped)
