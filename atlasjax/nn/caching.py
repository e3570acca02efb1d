"""The gates of Memory Caching in a layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory
from atlasjax.nn.caching_config import CachingConfig as CachingConfig
from atlasjax.nn.layers import Linear
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import param


def connector_projection(rule: memory.Rule, dim: int, num_heads: int, key_dim: int, *, rngs: nnx.Rngs) -> Linear | None:
    """W_u of u = x W_u, for a layer input of width `dim`; None for a rule without the gate `connector`."""
    channels = rule.gate_channels(key_dim).get("connector")
    return None if channels is None else Linear((dim, num_heads, channels), ("embed", "heads", None), rngs=rngs)


class CacheGates(Module):
    """The gates of Memory Caching around a layer's recurrence: u_t = x_t W_u, and one λ per head, initially 0, if `blended`.

    Args:
      rule: the `memory.CachedRule` or `memory.LogLinearRule`, which says what it needs.
      dim: width of the layer input.
      num_heads, key_dim: sizes of the memory.
      rngs: source of the initial values.
    """

    def __init__(self, rule: memory.Rule, dim: int, num_heads: int, key_dim: int, *, rngs: nnx.Rngs):
        self.connector = connector_projection(rule, dim, num_heads, key_dim, rngs=rngs)
        self.blend = (
            param(jnp.zeros(num_heads, jnp.float32), "heads") if "blend" in rule.gate_channels(key_dim) else None
        )

    def __call__(self, x: jax.Array, gates: memory.Gates) -> memory.Gates:
        """The recurrence's gates and those of Memory Caching, for the layer input x [batch, time, dim]."""
        blend = None if self.blend is None else jnp.broadcast_to(self.blend[...], (*x.shape[:2], self.blend.shape[0]))
        return gates._replace(connector=None if self.connector is None else self.connector(x), blend=blend)
