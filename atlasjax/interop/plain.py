"""The plain form of a model that no public family has: safetensors with the names of our parameters, and our config."""

from collections.abc import Mapping

import jax

import atlasjax
from atlasjax.config_json import from_dict, to_dict
from atlasjax.interop import tensors
from atlasjax.interop.tensors import listed
from atlasjax.nn import ModelConfig
from atlasjax.storage.tensors import DTYPES, KINDS
from atlasjax.train.errors import ConfigError

NAME = "atlasjax"
"""The name of the form, which is also `model_type` in config.json."""


def is_mine(given: Mapping[str, object]) -> bool:
    """Whether a config.json is of this form."""
    return given.get("model_type") == NAME


def config(model: ModelConfig) -> dict[str, object]:
    """The config.json of a model."""
    return {"model_type": NAME, "atlasjax_version": atlasjax.__version__, "model": to_dict(model)}


def model_of(given: Mapping[str, object], file: str) -> ModelConfig:
    """The model that a config.json describes. Names of own parts in it are those of a file: only trusted ones are imported.

    Raises:
      ValueError: a field is unknown or wrong, or a name is not trusted.
    """
    model = given.get("model")
    if not isinstance(model, dict):
        raise ValueError(f"{file}: model is {model!r:.80}; it must be an object with the fields of a model.")
    return from_dict(ModelConfig, model, file)


def check_embedding(folder: tensors.Folder, model: ModelConfig) -> None:
    """Raises ConfigError if the embedding in a folder has other sizes than a model: asked before anything of its size is made."""
    there, wanted = folder.tensors.get("embedding"), (model.vocab_size, model.dim)
    if there is not None and there.shape != wanted:
        raise ConfigError(f"{NAME}: tensor 'embedding' has shape {there.shape}, must be {wanted}.")


def check(folder: tensors.Folder, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ConfigError unless a folder has exactly these parameters, each in its shape and dtype."""
    there = folder.tensors
    missing, unknown = [x for x in shapes if x not in there], [x for x in there if x not in shapes]
    if missing:
        raise ConfigError(f"{NAME}: the tensors {listed(missing)} are missing.")
    if unknown:
        raise ConfigError(f"{NAME} has no tensors {listed(unknown)} in the model that config.json describes.")
    for name, shape in shapes.items():
        if there[name].shape != shape.shape:
            raise ConfigError(f"{NAME}: tensor {name!r} has shape {there[name].shape}, must be {shape.shape}.")
        if DTYPES.get(there[name].dtype) != shape.dtype:
            raise ConfigError(f"{NAME}: tensor {name!r} is {there[name].dtype}, must be {KINDS[shape.dtype]}.")
