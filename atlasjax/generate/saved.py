"""Contexts in files: the state of a model after reading a text."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlasjax.check import is_integer
from atlasjax.config_json import completed, to_dict
from atlasjax.generate.context import Context
from atlasjax.nn import LanguageModel, ModelConfig
from atlasjax.storage import StorePath, path, tensors

_KIND = "the memory of a language model"
_MOST = 2**31  # tokens are counted in int32
_TRAINING = {"remat": True, "dropout": 0.0}  # fields of a model that have no effect on what it reads


def save_context(model: LanguageModel, context: Context, file: str | os.PathLike[str] | StorePath) -> None:
    """Writes a context to a safetensors file, with the config of the model, a digest of its parameters and the number of tokens.

    The file has the states of all layers, the logits of the next token and which tokens were read; neither the text nor the
    parameters. It appears complete or not at all, in the place of one that is there; on a disk only its owner may read it.

    Args:
      model: the model that read the text.
      context: from `read`.
      file: the file, on a disk or in a store ("gs://…").

    Raises:
      TypeError: a mixer of your own has a state of a dtype that a file cannot hold.
      OSError: the file cannot be written.
    """
    ContextFiles(model).save(context, file)


def load_context(model: LanguageModel, file: str | os.PathLike[str] | StorePath) -> Context:
    """Reads a context that `save_context` wrote with the same model.

    Args:
      model: the model that read the text.
      file: the file, on a disk or in a store ("gs://…").

    Returns:
      The context, bit for bit, on the default device.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged or of another kind, or it was saved with another model, or the same one with other parameters;
        the message says what differs.
    """
    return ContextFiles(model).load(file)


class ContextFiles:
    """Files of the contexts of one model. The digest of its parameters is computed once, so they must not change.

    Args:
      model: the model that reads the texts.
    """

    def __init__(self, model: LanguageModel):
        self._model, self._about = model, _about(model)

    def save(self, context: Context, file: str | os.PathLike[str] | StorePath) -> None:
        """`save_context` of this context."""
        own = {"num_tokens": context.num_tokens.tolist(), "max_length": context.max_length, "note": context.note}
        tensors.save(path(file), _KIND, _arrays(context), self._about | own, mode=0o600)

    def load(self, file: str | os.PathLike[str] | StorePath) -> Context:
        """`load_context` for this model."""
        where = repr(str(path(file)))
        arrays, about = tensors.load(path(file), _KIND)
        # Compared as JSON: a config that the file described would be built by what the file names.
        saved = completed(about.get("model"), self._model.config)
        found = tensors.difference(saved, self._about["model"], "model")
        if found is not None:
            raise ValueError(f"{where} was saved with another model: {found}.")
        if about.get("params_sha256") != self._about["params_sha256"]:
            raise ValueError(
                f"{where} was saved with other parameters of this model, such as those of another step of its training."
            )
        counts = tensors.entry(about, "num_tokens", where, _are_counts, "a list of at least one number of tokens")
        fits = lambda value: is_integer(value, 1) and value < _MOST
        max_length = tensors.entry(about, "max_length", where, fits, f"an integer from 1 to {_MOST - 1}")
        note = tensors.entry({"note": ""} | about, "note", where, lambda value: isinstance(value, str), "text")
        num_tokens = np.array(counts, np.int32)
        batch, vocabulary = len(num_tokens), self._model.config.vocab_size
        # Shapes only: the sizes come from a file, and nothing is made of them before the arrays are known to have them.
        cache = jax.eval_shape(lambda: self._model.init_cache(batch, max_length))
        logits, seen = (jax.ShapeDtypeStruct((batch, vocabulary), dtype) for dtype in (jnp.float32, np.bool_))
        empty = Context(cache, logits, seen, num_tokens, max_length)  # type: ignore[arg-type]
        tensors.check_arrays(arrays, _arrays(empty), where)
        leaves = [jnp.array(arrays[name]) for name in tensors.named(cache, "cache")]
        cache = jax.tree.unflatten(jax.tree.structure(cache), leaves)
        return Context(cache, jnp.array(arrays["logits"]), arrays["seen"], num_tokens, max_length, note)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(is_integer(x, 0) and x < _MOST for x in value)


def _arrays(context: Context) -> dict[str, jax.Array | np.ndarray]:
    return {**tensors.named(context.cache, "cache"), "logits": context.logits, "seen": context.seen}


def _about(model: LanguageModel) -> dict[str, object]:
    """The model that a context belongs to, as values of JSON."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {"model": _model(model.config), "params_sha256": tensors.digest(tensors.named(params, "params"))}


def _model(config: ModelConfig) -> dict[str, object]:
    return to_dict(dataclasses.replace(config, **_TRAINING))  # type: ignore[arg-type]
