"""The memory as a layer: projections, short convolutions and gates around `atlasjax.memory`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.gates import GateProjection
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm, l2_normalize
from atlasjax.nn.parameters import param, values


class MemoryMixerState(NamedTuple):
    """What the mixer carries from call to call; its size does not depend on how much was read.

    Attributes:
      conv: the last conv_width − 1 projections, [batch, conv_width − 1, 3, heads · head_dim], in the model's dtype.
      memory: the memory, float32.
    """

    conv: jax.Array
    memory: memory.MemoryState


def _memory_params(rule: memory.MemoryRule, key: jax.Array, num_heads: int, head_dim: int) -> memory.MemoryParams:
    """`memory.init_params` with every array a Param."""
    initial = memory.init_params(rule, key, num_heads=num_heads, key_dim=head_dim, value_dim=head_dim)
    # Any: `MemoryParams` is declared with arrays, and holds the Params that stand for them.
    weights: Any = {name: param(w, "heads", "memory_out", "memory_in") for name, w in initial.weights.items()}
    coefficients: Any = None if initial.coefficients is None else param(initial.coefficients, "heads", None)
    norm: Any = None if initial.norm is None else {name: param(x, "heads", None) for name, x in initial.norm.items()}
    return memory.MemoryParams(weights, coefficients, norm)


class MemoryMixer(nnx.Module):
    """Tokens write to and read from a memory, per head.

        q, k, v = SiLU(conv(x W_qkv)),  q and k of unit length            as in DeltaNet
        y_t     = M_t(φ(q_t)),  M_t the memory after writing (k_t, v_t)   `memory.scan`, gates from x
        out     = (RMSNorm(y) ⊙ SiLU(x W_gate)) W_out                     one norm for each head

    v starts at about unit length: the targets' scale is the scale that a memory's weights must grow to, and with them the
    curvature that limits the step size.

    Args:
      config: dim, num_heads, head_dim, conv_width, norm_eps, num_layers (for W_out's initial scale) and memory.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dim, heads, head_dim = config.dim, config.num_heads, config.resolved_head_dim
        inner = heads * head_dim
        self.heads = heads
        self.dtype = jnp.dtype(config.dtype)
        self.rule = config.memory.build()
        self.inputs = Linear(
            (dim, 4, inner), ("embed", None, "heads"), rngs=rngs
        )  # q, k, v and output gate in one product
        self.inputs.kernel[...] = self.inputs.kernel[...] * jnp.array([1.0, 1.0, head_dim**-0.5, 1.0])[:, None]
        self.conv = CausalConv(config.conv_width, (3, inner), (None, "heads"), rngs=rngs)
        self.gates = GateProjection(
            self.rule, dim=dim, num_heads=heads, key_dim=head_dim, value_dim=head_dim, max_step=config.memory.max_step,
            rngs=rngs,
        )  # fmt: skip
        self.memory = nnx.data(_memory_params(self.rule, rngs.params(), heads, head_dim))
        self.norm = RMSNorm((heads, head_dim), ("heads", None), config.norm_eps)
        self.out = Linear((inner, dim), ("heads", "embed"), scale=(2 * config.num_layers) ** -0.5, rngs=rngs)

    def init_state(self, batch_size: int) -> MemoryMixerState:
        """The state before the first token: a fresh memory, an empty convolution."""
        fresh = memory.init_state(self.rule, values(self.memory), batch_size=batch_size)
        return MemoryMixerState(self.conv.init_state(batch_size, self.dtype), fresh)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences from a fresh memory: [batch, time, dim] → [batch, time, dim].

        Args:
          x: the layer input, in the model's dtype.
          segment_ids: integers ≥ 0, [batch, time]; neither memory nor convolution reaches over a change of the id.
          max_segments: static bound on the segments of a row; needed under jit with `segment_ids`.
        """
        q, k, v, gate, _ = self._project(x, self.conv.init_state(x.shape[0], x.dtype), segment_ids)
        y, _ = memory.scan(
            self.rule, values(self.memory), None, q, k, v, self.gates(x), segment_ids=segment_ids,
            max_segments=max_segments,
        )  # fmt: skip
        return self._output(y, gate)

    def extend(self, x: jax.Array, state: MemoryMixerState) -> tuple[jax.Array, MemoryMixerState]:
        """The next piece of a sequence, any time ≥ 1; one token goes through `memory.step`."""
        q, k, v, gate, conv = self._project(x, state.conv, None)
        gates, params = self.gates(x), values(self.memory)
        if x.shape[1] == 1:
            q, k, v, gates = jax.tree.map(lambda a: a[:, 0], (q, k, v, gates))
            y, after = memory.step(self.rule, params, state.memory, q, k, v, gates)
            y = y[:, None]
        else:
            y, after = memory.scan(self.rule, params, state.memory, q, k, v, gates)
        return self._output(y, gate), MemoryMixerState(conv, after)

    def _project(
        self, x: jax.Array, conv_state: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """q, k, v: [batch, time, heads, head_dim]; the output gate, [batch, time, inner]; the convolution's next state."""
        inputs = self.inputs(x)
        mixed, conv_state = self.conv(inputs[:, :, :3], conv_state, segment_ids)
        heads = jax.nn.silu(mixed).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = l2_normalize(heads[:, :, 0]), l2_normalize(heads[:, :, 1]), heads[:, :, 2]
        return q.astype(x.dtype), k.astype(x.dtype), v.astype(x.dtype), jax.nn.silu(inputs[:, :, 3]), conv_state

    def _output(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        return self.out(self.norm(y).reshape(gate.shape) * gate)
