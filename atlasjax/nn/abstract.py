"""Properties of a model that need no allocated arrays: shapes, logical axes, parameter counts and cache sizes."""

import math

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from atlasjax.nn.config import ModelConfig
from atlasjax.nn.model import LanguageModel


def abstract_model(config: ModelConfig) -> LanguageModel:
    """The model with a `jax.ShapeDtypeStruct` in place of every parameter."""
    return nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))


def logical_axes(model: nnx.Module | ModelConfig) -> nnx.State:
    """Logical axis names of every parameter. Nothing is allocated.

    Args:
      model: a model, abstract or not, or a config.

    Returns:
      A tree with the structure of `nnx.split(model, nnx.Param)[1]`. In place of each array it has a `PartitionSpec` of names from
      `atlasjax.nn.parameters.AXES`, one per axis of the array. A `PartitionSpec` is a leaf for `jax.tree.map`.

    Raises:
      ValueError: a Param has no metadata `logical_axes`, or a wrong number of names.
    """
    if isinstance(model, ModelConfig):
        model = abstract_model(model)
    _, params = nnx.split(model, nnx.Param)

    def names(path: jax.tree_util.KeyPath, variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata("logical_axes", None)
        rank = len(variable.get_value().shape)
        if axes is None or len(axes) != rank:
            raise ValueError(f"{jax.tree_util.keystr(path)}: logical_axes {axes} do not name {rank} axes.")
        return variable.replace(PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(names, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def count_parameters(config: ModelConfig, *, embeddings: bool = True, active: bool = False) -> int:
    """Total size of all parameters of a model. `embeddings=False` leaves out the embedding and an untied head; `active=True` the
    experts that a token does not choose."""
    model = abstract_model(config)
    _, params = nnx.split(model, nnx.Param)
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    if active:
        given = config.experts
        projections = 3 if given.network == "swiglu" else 2
        idle = config.num_expert_layers * (given.number - given.per_token)
        total -= idle * projections * config.dim * config.expert_width
    tables = 1 if config.tie_embeddings else 2
    return total if embeddings else total - tables * config.vocab_size * config.dim


def state_bytes(model: LanguageModel | ModelConfig, *, length: int | None = None) -> int:
    """Size in bytes of the decoding cache of one sequence.

    Args:
      model: a model, abstract or not, or a config.
      length: number of tokens, as max_length of `LanguageModel.init_cache`, for the mixers that use it.

    Raises:
      ValueError: length is None and a mixer requires it.
    """
    if isinstance(model, ModelConfig):
        model = abstract_model(model)
    graphdef, params = nnx.split(model, nnx.Param)
    cache = jax.eval_shape(lambda p: nnx.merge(graphdef, p).init_cache(1, length), params)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
