"""A model as the argument of compiled functions, in a form that costs a call nothing."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from atlasjax.nn import LanguageModel
from atlasjax.nn.unrolled import CacheForm, UnrolledModel, faster_unrolled


class Definition:
    """A model without its parameters: a static argument, equal for equal models.

    A call of a jitted function hashes its static arguments and flattens the others. Flax does both by walking the whole model in
    Python, which takes longer than a token of a small model. Here the hash is computed once, and the parameters are a plain list.

    Args:
      graphdef: of the model.
      structure: of its parameters.
    """

    def __init__(self, graphdef: nnx.GraphDef, structure: jax.tree_util.PyTreeDef):
        self._both = graphdef, structure
        self._hash = hash(self._both)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Definition) and self._both == other._both)

    def merge(self, params: list[jax.Array]) -> LanguageModel:
        """The model with these parameters."""
        graphdef, structure = self._both
        return nnx.merge(graphdef, jax.tree.unflatten(structure, params))


def split(model: LanguageModel) -> tuple[Definition, list[jax.Array]]:
    """A model's definition and its parameters."""
    graphdef, params = nnx.split(model, nnx.Param)
    leaves, structure = jax.tree.flatten(params)
    return Definition(graphdef, structure), leaves


class Decoder(NamedTuple):
    """A model in the form in which it decodes fastest.

    Attributes:
      definition, params: of the model in this form (`split`). The parameters share the model's memory.
      form: of its cache.
    """

    definition: Definition
    params: list[jax.Array]
    form: CacheForm


def decoder(model: LanguageModel, state_bytes: int = 0) -> Decoder:
    """The decoder of a model. state_bytes: of a cache that is read so often that a longer program pays."""
    definition, params = split(model)
    number = faster_unrolled(model, state_bytes)
    if number is None:
        return Decoder(definition, params, CacheForm())
    unrolled, places = _unrolled(definition, len(params), number)
    views = {i: np.asarray(params[i]) for i, row in places if row is not None}
    share = functools.partial(jax.device_put, may_alias=True)
    own = [params[i] if row is None else share(views[i][row]) for i, row in places]
    return Decoder(unrolled, own, CacheForm(number))


@functools.lru_cache(maxsize=16)  # walking all layers in Python takes longer than a token
def _unrolled(definition: Definition, count: int, number: int) -> tuple[Definition, list[tuple[int, int | None]]]:
    """The definition of a model unrolled, and for each parameter which one of the model's `count` it is, and which of its `number`
    rows, or None if it is the whole one."""
    # In place of each parameter, the numbers of its rows.
    marked, marks = split(UnrolledModel(definition.merge(list(np.arange(count * number).reshape(count, number)))))  # type: ignore[arg-type]
    places = [(int(np.ravel(mark)[0]) // number, None if np.ndim(mark) else int(mark) % number) for mark in marks]
    return marked, places
