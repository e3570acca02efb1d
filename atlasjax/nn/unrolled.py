"""A model whose layers have arrays of their own, for decoding on a CPU.

A loop over stacked layers takes each layer's parameters and state out of the stacks. XLA's CPU backend copies what it takes out, at
every token: a step of few texts reads and writes several times the bytes of the parameters.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from atlasjax.nn.model import InnerCache, LanguageModel, PositionedCache
from atlasjax.nn.stack import Layer, Pattern

_LEAST_BYTES = 2**21  # of a layer: below, a step gains less than the longer program takes to compile


class UnrolledModel(LanguageModel):
    """A model that decodes one layer after the other without a loop. It reads no whole sequences.

    Its caches (`CacheForm`) have a tuple in place of the stacked states: of each repetition of the pattern its own, [batch, …].

    Args:
      model: a model.
    """

    def __init__(self, model: LanguageModel):
        self.config, self.dtype = model.config, model.dtype
        self.embedding, self.positions, self.embedding_norm = model.embedding, model.positions, model.embedding_norm
        self.inner, self.norm, self.head = model.inner, model.norm, model.head
        graphdef, params = nnx.split(model.layers, nnx.Param)
        number = jax.tree.leaves(params)[0].shape[0]
        own = lambda i: jax.tree.map(lambda array: array[i], params)
        self.repetitions = nnx.List([nnx.merge(graphdef, own(i)) for i in range(number)])

    def init_cache(self, batch_size: int, max_length: int | None = None) -> PyTree:
        """As for the model, in this form."""
        states = tuple(layer.init_state(batch_size, max_length) for layer in self._each())
        return self._whole_cache(states, batch_size, max_length)

    def _check_cache(self, cache: PyTree, batch: int) -> None:
        """Nothing: who decodes made it of one that was checked."""

    def _extend_stack(
        self, x: Float[Array, "batch time dim"], states: PyTree
    ) -> tuple[Float[Array, "batch time dim"], PyTree]:
        layers, after = self._each(), []
        first = layers[0].first_values(x, states[0], None) if layers[0].has_first_values else None
        for layer, state in zip(layers, states, strict=True):
            x, new = layer.extend(x, state, None, first)
            after.append(_written_last(state, new, x))
        return x, tuple(after)

    def _each(self) -> list[Layer | Pattern]:
        return list(self.repetitions)


def faster_unrolled(model: LanguageModel, state_bytes: int = 0) -> int | None:
    """The number of repetitions of a model that decodes faster unrolled: on one CPU, with large layers. None for others.

    state_bytes: of all layers, if they count beside the parameters.
    """
    params = jax.tree.leaves(nnx.state(model.layers, nnx.Param))
    devices = {device for leaf in params if isinstance(leaf, jax.Array) for device in leaf.devices()}
    number = params[0].shape[0]
    is_large = state_bytes + sum(leaf.nbytes for leaf in params) >= _LEAST_BYTES * number
    return number if is_large and len(devices) == 1 and devices.pop().platform == "cpu" else None


@dataclasses.dataclass(frozen=True)
class CacheForm:
    """How the cache of a model lies while it decodes.

    Attributes:
      repetitions: of the pattern, each with states of its own, as in an `UnrolledModel`. None: as the model's own cache.
    """

    repetitions: int | None = None

    def of(self, cache: PyTree) -> PyTree:
        """A cache of the model in this form."""
        if (number := self.repetitions) is None:
            return cache
        return _of_layers(lambda states: tuple(jax.tree.map(lambda x, i=i: x[i], states) for i in range(number)), cache)

    def back(self, cache: PyTree) -> PyTree:
        """The inverse of `of`."""
        if self.repetitions is None:
            return cache
        return _of_layers(lambda states: jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), cache)

    def map_rows(self, function: Callable[..., jax.Array], cache: PyTree, *more: PyTree) -> PyTree:
        """function(axis of the batch, leaf, …) of the leaves of caches in this form."""
        axes = jax.tree.map(lambda _: 1, cache)
        if self.repetitions is not None:
            axes = _of_layers(lambda states: jax.tree.map(lambda _: 0, states), axes)
        return jax.tree.map(function, axes, cache, *more)


def _of_layers(function: Callable[[PyTree], PyTree], cache: PyTree) -> PyTree:
    """A cache with function(the states of its layers) in their place."""
    if isinstance(cache, PositionedCache | InnerCache):
        return cache._replace(layers=_of_layers(function, cache.layers))
    return function(cache)


def _written_last(before: PyTree, state: PyTree, x: jax.Array) -> PyTree:
    """`state`, which cannot be computed before the layer's output x: then XLA writes it in the place of `before`, which x was
    computed from. Otherwise it may copy one of the two. XLA's CPU compiler drops an `optimization_barrier` before it decides."""
    never = jnp.max(jnp.abs(x)) > jnp.inf
    return jax.tree.map(lambda old, new: jnp.where(never, jnp.zeros_like(old), new.astype(old.dtype)), before, state)
