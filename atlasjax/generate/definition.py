"""A model as the argument of compiled functions, in a form that costs a call nothing."""

import jax
from flax import nnx

from atlasjax.nn import LanguageModel


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
