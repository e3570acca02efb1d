"""Loads a trained model from the folder of its run."""

import dataclasses

import jax

from atlasjax import storage
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.distributed.mesh import MeshConfig, make_mesh
from atlasjax.distributed.sharding import parameter_shardings
from atlasjax.nn import LanguageModel, logical_axes
from atlasjax.nn.mixer_check import why_not_decoded
from atlasjax.train import state as state_lib
from atlasjax.train.config import TrainConfig, saved_config
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.saving.checkpoint import Checkpoints
from atlasjax.train.saving.runs import checkpoint_folder
from atlasjax.train.setup import run_tokenizer
from atlasjax.train.trainable import select, trainable_mask


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """The model of a run, with its tokenizer and configuration.

    Attributes:
      model: the model with the checkpoint's parameters, split over all local devices where their sizes allow it.
      tokenizer: the tokenizer of the run.
      config: the configuration of the run.
      step: optimizer steps done.
      skipped: newer checkpoints that could not be used, as (step, reason).
    """

    model: LanguageModel
    tokenizer: Tokenizer
    config: TrainConfig
    step: int
    skipped: list[tuple[int, str]]


def load_run(
    run_dir: str | storage.AnyPath, step: int | None = None, *, ema: bool = False, decodes: bool = False
) -> LoadedRun:
    """Loads the newest usable checkpoint of a run, or the checkpoint of `step`.

    Args:
      run_dir: the run's folder.
      step: step of the checkpoint. None: the newest usable one.
      ema: whether to take the moving average of the parameters instead of the parameters.
      decodes: whether the model should decode tokens.

    Raises:
      ConfigError: there is no run in the folder, its tokenizer or config cannot be used, there is no moving average, or the model
        should decode tokens and one of its mixers does not.
      CheckpointError: no checkpoint is usable, or `step` is not there.
    """
    with Checkpoints(checkpoint_folder(run_dir), clean=False) as checkpoints:
        saved = checkpoints.config(step) if step in checkpoints.steps() else checkpoints.newest_config()
        if saved is None:
            raise ConfigError(f"run_dir is {str(run_dir)!r}; the run in it has no checkpoint that can be read.")
        with user_errors():
            config = dataclasses.replace(saved_config(saved, run_dir), run_dir=str(run_dir))
            tokenizer = run_tokenizer(config)
            why = why_not_decoded(config.model) if decodes else None
        if why is not None:
            raise ConfigError(f"run_dir is {str(run_dir)!r}; its model decodes no tokens: {why}")
        graphdef, shapes = state_lib.model_shapes(config.model)
        mesh = make_mesh(MeshConfig(data=1, fsdp=-1))
        shardings, _ = parameter_shardings(state_lib.pure(logical_axes(config.model)), shapes, mesh)
        abstract = jax.tree.map(
            lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where), shapes, shardings
        )
        average = None
        if ema:
            if config.optimizer.ema_decay is None:
                raise ConfigError(
                    f"run_dir is {str(run_dir)!r}; the run in it has no moving average of its parameters (optimizer.ema_decay)."
                )
            average = select(abstract, trainable_mask(config.optimizer.trainable, shapes))
        params, used, skipped = checkpoints.restore_params(abstract, step, ema=average)
    return LoadedRun(state_lib.merge(graphdef, params), tokenizer, config, used, skipped)
