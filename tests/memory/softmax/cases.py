"""Softmax rules and inputs, shared by every test of softmax memories."""

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax import memory
from atlasjax.memory import objectives, optimizers, retention, structures
from atlasjax.memory.softmax import SoftmaxRule
from tests.memory.own_ideas import LogCosh

MATRIX, MLP = structures.Matrix(), structures.MLP(expansion=2)
L2, MOMENTUM, FULL = objectives.L2(), optimizers.Momentum(), retention.Full()

# Every choice appears at least once: windows longer than chunks, caches shorter than chunks and longer than the sequence,
# one-token chunks, chunks longer than a block.
RULES: dict[str, SoftmaxRule] = {
    "attention": SoftmaxRule(MATRIX, retention=FULL),
    "decay_momentum": SoftmaxRule(MATRIX, optimizer=MOMENTUM),
    "sliding": SoftmaxRule(MATRIX, cache_window=6),
    "matrix_window": SoftmaxRule(MATRIX, optimizer=MOMENTUM, window=3, cache_window=9, normalized=False),
    "deep_transformer": SoftmaxRule(MLP, chunk_size=8),
    "deep_transformer_online": SoftmaxRule(MLP, optimizer=MOMENTUM, chunk_size=1),
    "deep_unnormalized": SoftmaxRule(MLP, retention=FULL, normalized=False, chunk_size=5),
    "swdt": SoftmaxRule(MLP, cache_window=7, chunk_size=4, scale=2.5),
    "swdt_cache_under_chunk": SoftmaxRule(MLP, optimizer=MOMENTUM, cache_window=3, chunk_size=8, window=2),
    "swdt_cache_over_length": SoftmaxRule(MLP, cache_window=50, chunk_size=4, normalized=False),
    "dot_matrix": SoftmaxRule(MATRIX, L2, window=4, chunk_size=6, scale=2.0),
    "dot_delta": SoftmaxRule(MATRIX, L2, retention=FULL, normalized=False, chunk_size=1),
    "dot": SoftmaxRule(MLP, L2, MOMENTUM, window=3, chunk_size=8),
    "dot_window_over_chunk": SoftmaxRule(MLP, L2, window=7, chunk_size=3),
    "dot_sliding": SoftmaxRule(MLP, L2, MOMENTUM, window=4, cache_window=5, chunk_size=3),
    "own_loss": SoftmaxRule(MLP, LogCosh(), MOMENTUM, window=2, chunk_size=5),
}


def make_inputs(rule, *, batch=2, time=23, heads=2, key_dim=4, value_dim=4, dtype=jnp.float32, seed=0, **overrides):
    """(params, q, k, v, gates): normalized keys, gates inside their ranges. `overrides` sets gates to constants."""
    rng = np.random.default_rng(seed)
    wide = jnp.promote_types(dtype, jnp.float32)
    params = memory.init_params(rule, jax.random.key(seed), num_heads=heads, key_dim=key_dim, value_dim=value_dim)
    params = jax.tree.map(lambda x: jnp.asarray(x, wide), params)
    normal = lambda dim: rng.standard_normal((batch, time, heads, dim))
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v = unit(normal(key_dim)), unit(normal(key_dim)), normal(value_dim)
    scale = {
        "retention": (0.7, 1.0),
        "momentum_decay": (0.2, 0.9),
        "window_weights": (0.1, 1.0),
        "step_size": (0.05, 0.3),
    }
    gates = {}
    for name, channels in rule.gate_channels(key_dim).items():
        shape = (batch, time, heads) if channels is None else (batch, time, heads, channels)
        value = np.full(shape, overrides[name]) if name in overrides else rng.uniform(*scale[name], shape)
        gates[name] = jnp.asarray(value, wide)
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return params, q, k, v, memory.Gates(**gates)
