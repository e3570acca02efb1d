"""How much of the history an elastic memory holds (E App. B.2, Table 13): keys and values rebuilt from its coefficients.

The memory is that of the last block: it has read all tokens before it. Each of these tokens' keys and values is compared with what
the coefficients give at its place, the middle of the token. E gives the mean squared error alone, whose unit is the model's; beside
it we give its share of the mean square.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.mixers.elastic import hippo
from atlasjax.nn import ModelConfig
from atlasjax.nn.elastic import ElasticMixer


def errors(signal: jax.Array, order: int, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Squares of what N coefficients lose of a signal [batch, time, channels], and of the signal, each summed.

    Args:
      signal: the tokens.
      order: N.
      options: discretization and legacy_hippo of `hippo.compress`.
    """
    time = signal.shape[1]
    coefficients = hippo.compress(signal, order, **options)
    rebuilt = hippo.reconstruct(coefficients, np.arange(time) + 0.5, time)
    return jnp.sum((rebuilt - signal) ** 2), jnp.sum(signal**2)


class Recorded(ElasticMixer):
    """`ElasticMixer` that notes for each batch the two `errors` of its keys and values, and how many numbers these are.

    A config names its mixers by their place in a module, so the notes are the class's own.
    """

    notes: ClassVar[list[tuple[float, float, int]]] = []

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super()._project(x)
        last = (x.shape[1] - 1) // self.block_size * self.block_size
        if last == 0:  # of one block there is nothing in the memory
            return q, k, v
        history = jnp.concatenate([k, v], axis=-1)[:, :last].astype(jnp.float32)
        history = history.reshape(*history.shape[:2], -1)
        settings = self.elastic
        lost, whole = errors(
            history, settings.order, discretization=settings.discretization, legacy_hippo=settings.legacy_hippo
        )
        note = lambda lost, whole: self.notes.append((float(lost), float(whole), history.size))
        jax.debug.callback(note, lost, whole)  # layers may run in a scan
        return q, k, v


def reconstruction(config: ModelConfig, params: Any, batches: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """The error of a trained model's elastic memories on held-out text.

    Args:
      config: a model with the mixer "elastic".
      params: its parameters, in the form of `TrainState.params`.
      batches: held-out text, sequences of two blocks or more.

    Returns:
      mean_squared_error, of keys and values of all layers that have the memory, and share, which it is of their mean square.
    """
    from atlasjax.train import state as state_lib

    mixers: tuple[Any, ...] = tuple(Recorded if name == "elastic" else name for name in config.pattern)
    graphdef = state_lib.model_shapes(dataclasses.replace(config, mixer=mixers))[0]
    read = jax.jit(lambda params, inputs: state_lib.merge(graphdef, params)(inputs))
    Recorded.notes.clear()
    for batch in batches:
        jax.block_until_ready(read(params, batch["inputs"]))
    jax.effects_barrier()
    lost, whole, count = np.sum(np.asarray(Recorded.notes, np.float64), axis=0)
    return {"mean_squared_error": lost / count, "share": lost / whole}
