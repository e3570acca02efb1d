"""Rules and inputs of large-chunk memories, whose chunks are short here."""

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax import memory
from atlasjax.memory import LargeChunkRule, objectives, structures

# Each choice at least once, one of them alone.
RULES: dict[str, LargeChunkRule] = {
    "lact": LargeChunkRule(chunk_size=6, momentum=True, schedule="lact"),
    "sums": LargeChunkRule(structures.SwiGLU(expansion=2), chunk_size=5),
    "matrix": LargeChunkRule(structures.Matrix(), chunk_size=4, row_norm=False),
    "residual": LargeChunkRule(
        structures.MLP(expansion=1, norm=True), objectives.Huber(), chunk_size=1, momentum=True, row_norm=False
    ),
}
RANGES = {"step_size": (0.02, 0.2), "momentum_decay": (0.2, 0.9), "threshold": (0.3, 1.0)}


def make_inputs(rule, *, batch=2, time=23, heads=2, key_dim=4, value_dim=4, dtype=jnp.float64, seed=0):
    """(params, q, k, v, gates), with an M_0 that is not zero."""
    rng = np.random.default_rng(seed)
    wide = jnp.promote_types(dtype, jnp.float32)
    params = memory.init_params(rule, jax.random.key(seed), num_heads=heads, key_dim=key_dim, value_dim=value_dim)
    params = jax.tree.map(lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape), wide), params)
    normal = lambda dim: jnp.asarray(rng.standard_normal((batch, time, heads, dim)), dtype)
    q, k, v = normal(key_dim), normal(key_dim), normal(value_dim)
    gates = {
        name: jnp.asarray(rng.uniform(*RANGES[name], (batch, time, heads, *([channels] if channels else []))), wide)
        for name, channels in rule.gate_channels(key_dim, value_dim).items()
    }
    return params, q, k, v, memory.Gates(**gates)
