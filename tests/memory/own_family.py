"""A rule with a memory of another kind than the library's, as a user would write it: a moving sum of k ⊙ v."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax import memory
from atlasjax.memory.rule import Sizes


class Params(NamedTuple):
    scale: jax.Array  # [heads, dim]


class State(NamedTuple):
    sums: jax.Array  # [batch, heads, dim]
    segment: jax.Array  # [batch]

    @property
    def heads_axis(self) -> int:  # of its arrays, for `distributed.cache_shardings`
        return 1


@dataclasses.dataclass(frozen=True)
class MovingSum(memory.Rule):
    """s_t = α_t s_{t−1} + k_t ⊙ v_t,  y_t = scale ⊙ q_t ⊙ s_t."""

    def gate_channels(self, key_dim, value_dim=None):
        return {"retention": None}

    def sizes(self, params):
        heads, dim = params.scale.shape
        return Sizes(heads, dim, dim)

    def init_params(self, key, *, num_heads, key_dim, value_dim):
        return Params(1.0 + jax.random.uniform(key, (num_heads, key_dim)))

    def init_state(self, params, *, batch_size, max_length=None):
        return State(jnp.zeros((batch_size, *params.scale.shape), params.scale.dtype), jnp.full(batch_size, -1))

    def scan(self, params, state, q, k, v, gates, segment_ids=None, max_segments=None, *, lengths=None):
        """All tokens in parallel."""
        state = self.init_state(params, batch_size=q.shape[0]) if state is None else state
        decay, added, segment = gates.retention[..., None], k * v, state.segment
        if segment_ids is not None:
            before = jnp.where(segment < 0, segment_ids[:, 0], segment)
            starts = segment_ids != jnp.concatenate([before[:, None], segment_ids[:, :-1]], axis=1)
            decay, segment = jnp.where(starts[..., None, None], 0.0, decay), segment_ids[:, -1]
        if lengths is not None:
            real = (jnp.arange(q.shape[1]) < lengths[:, None])[..., None, None]
            decay, added = jnp.where(real, decay, 1.0), jnp.where(real, added, 0.0)
        join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        decays, sums = jax.lax.associative_scan(join, (jnp.broadcast_to(decay, added.shape), added), axis=1)
        sums = sums + decays * state.sums[:, None]
        return params.scale * q * sums, State(sums[:, -1], segment)

    def step(self, params, state, q, k, v, gates):
        sums = gates.retention[..., None] * state.sums + k * v
        return params.scale * q * sums, state._replace(sums=sums)

    def read(self, params, state, q):
        return params.scale * q * state.sums[:, None]

    def reference(self, params, state, q, k, v, gates, segment_ids=None):
        state = self.init_state(params, batch_size=q.shape[0]) if state is None else state
        ids = jnp.broadcast_to(state.segment[:, None], q.shape[:2]) if segment_ids is None else segment_ids

        def token(state, xs):
            q, k, v, gates, segment = xs
            new = (segment != state.segment) & (state.segment >= 0)
            y, after = self.step(params, State(jnp.where(new[:, None, None], 0.0, state.sums), segment), q, k, v, gates)
            return after, y

        by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, gates, ids))
        state, y = jax.lax.scan(token, state, by_time)
        return jnp.moveaxis(y, 0, 1), state

    def cached_weights(self, state):
        return {"sums": state.sums[..., None]}

    def read_cached(self, dtype, params, weights, q):
        return params.scale * q * weights["sums"][:, 0]
