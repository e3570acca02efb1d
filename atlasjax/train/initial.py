"""Starts a run from the parameters of another run, to whose model Memory Caching and a branch may be added."""

import dataclasses

import jax
from jaxtyping import PyTree

from atlasjax.config_json import to_dict
from atlasjax.nn import ModelConfig
from atlasjax.storage.tensors import named
from atlasjax.train import state as state_lib
from atlasjax.train.config import TrainConfig, changes_on_resume, run_folder
from atlasjax.train.saving.checkpoint import Checkpoints
from atlasjax.train.saving.runs import run_config
from atlasjax.train.saving.step_folders import complete_steps
from atlasjax.train.trainable import marked, replaced, select


def check_base(config: TrainConfig) -> None:
    """Checks that a new run can start from `config.init_from`. Does nothing if that is None.

    Raises:
      ValueError: there is no such run, its model or tokenizer is another one, what is added changes the model, or the run has begun
        with parameters of its own.
    """
    if config.init_from is None:
        return
    if complete_steps(run_folder(config.run_dir) / "checkpoints"):
        begun = run_config(config.run_dir)
        if begun is not None and begun.init_from is None:  # another path may be that of the same run, which was moved
            raise ValueError(
                f"init_from is {config.init_from!r}, but run_dir={config.run_dir!r} holds a run that began with parameters of its "
                "own. Give another run_dir for a new run, or leave init_from out to resume this one."
            )
        return
    base = run_config(config.init_from)
    if base is None or not complete_steps(run_folder(config.init_from) / "checkpoints"):
        raise ValueError(f"init_from is {config.init_from!r}; there is no run with a checkpoint in it.")
    if config.data.source != "prepared" and config.data.tokenizer != base.data.tokenizer:
        raise ValueError(
            f"data.tokenizer is {config.data.tokenizer!r}; the run in init_from={config.init_from!r} has {base.data.tokenizer!r}."
        )
    kept = dataclasses.replace(config.model, dropout=base.model.dropout)
    if base.model.caching is None and config.model.caching is not None:
        _check_added(config.model)
        kept = dataclasses.replace(kept, caching=None)
    hierarchy, trained = config.model.memory.hierarchy, base.model.memory.hierarchy
    if hierarchy is not None and trained is not None:
        as_trained = dataclasses.replace(hierarchy, fine_chunks=trained.fine_chunks)
        kept = dataclasses.replace(kept, memory=dataclasses.replace(kept.memory, hierarchy=as_trained))
    if base.model.branch is None:
        kept = dataclasses.replace(kept, branch=None)
    architecture, _, _ = changes_on_resume({"model": to_dict(base.model)}, {"model": to_dict(kept)})
    if architecture:
        raise ValueError(
            f"The run in init_from={config.init_from!r} has another architecture ({', '.join(architecture)}). A run starts from "
            "the parameters of the same model; Memory Caching and a branch may be added, and the dropout and the fine_chunks of a "
            "hierarchy may change."
        )


def _check_added(model: ModelConfig) -> None:
    caching = model.caching
    assert caching is not None
    if caching.start != "carry":
        raise ValueError(
            f'model.caching.start is "{caching.start}", which clears the memory at the start of every segment: the trained model '
            'did not do this. Give "carry".'
        )
    if not caching.blended:
        raise ValueError(
            f'model.caching has blended=False: with aggregation "{caching.aggregation}" cached memories then have a weight before '
            "the first step, and the model is not the trained one. Give blended=True, whose weight starts at 0."
        )


def base_params(config: TrainConfig, shardings: PyTree) -> tuple[PyTree, list[str]]:
    """The parameters that a run starts from: those of `config.init_from`, and initial ones for what is added.

    Args:
      config: the run, which `check_base` has accepted.
      shardings: of its parameters, a nested dict.

    Returns:
      The nested dict of all parameters, and lines for the user.

    Raises:
      CheckpointError: no checkpoint of the other run can be read.
    """
    assert config.init_from is not None
    base = run_config(config.init_from)
    assert base is not None
    _, shapes = state_lib.model_shapes(base.model)
    old = named(shapes)
    given = marked(shardings, lambda path: path in old)
    added = marked(shardings, lambda path: path not in old)
    abstract = jax.tree.map(
        lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
        shapes,
        select(shardings, given),
    )
    # clean=False: the other run may still be training, and saving.
    with Checkpoints(run_folder(config.init_from) / "checkpoints", clean=False) as checkpoints:
        params, step, _ = checkpoints.restore_params(abstract)
        lines = [f"Starting from the parameters in {checkpoints.path(step)}."]
    if places := select(shardings, added):
        make = lambda key: select(state_lib.init_params(config.model, state_lib.initial_key(key)), added)
        new = jax.jit(make, out_shardings=places)(jax.random.key(config.seed))
        lines.append(f"{sum(x.size for x in jax.tree.leaves(new)):,} parameters are new: {', '.join(named(new))}.")
        params = replaced(params, new)
    return params, lines
