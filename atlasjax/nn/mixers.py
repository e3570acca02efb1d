"""The one interface of everything that mixes tokens, and the list of what there is.

A new mixer is one class with these three methods and one line of `MIXERS`.
"""

from typing import Any, Protocol

import jax
from flax import nnx

from atlasjax.names import lookup
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.memory_mixer import MemoryMixer


class Mixer(Protocol):
    """An `nnx.Module` made by `Class(config, rngs=rngs)`; parameters by `atlasjax.nn.parameters.param`."""

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]; token t sees tokens ≤ t of its own segment."""

    def init_state(self, batch_size: int) -> Any:
        """The state before the first token: a pytree of arrays with the batch axis first."""

    def extend(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The next piece [batch, time ≥ 1, dim]; any cutting of a sequence into pieces gives what `__call__` gives."""


MIXERS: dict[str, type] = {
    "memory": MemoryMixer,
}


def make_mixer(config: ModelConfig, *, rngs: nnx.Rngs) -> Mixer:
    """The mixer that `config.mixer` names.

    Raises:
      ValueError: no such mixer.
    """
    return lookup("mixer", config.mixer, MIXERS)(config, rngs=rngs)
