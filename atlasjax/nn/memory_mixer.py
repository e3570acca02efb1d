"""A memory as a layer: projections, short convolutions and gates around `atlasjax.memory`."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from atlasjax import memory
from atlasjax.memory.layerwise import put_layer, take_layer
from atlasjax.nn.attention import output_projection
from atlasjax.nn.cache_check import check_state
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.execution import Execution, MemoryCall, execution
from atlasjax.nn.gates import GateProjection
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm, l2_normalize
from atlasjax.nn.module import LayerwiseModule, Module, ObservedModule
from atlasjax.nn.parameters import param, values


class MemoryMixerState(NamedTuple):
    """The streaming state. Its size does not depend on the number of tokens read, or is set by max_length if all are kept.

    Attributes:
      conv: the last conv_width − 1 projections, [batch, conv_width − 1, 2 + value_expansion, heads · head_dim], in the model's
        dtype.
      memory: the memory's state, float32.
    """

    conv: jax.Array
    memory: memory.MemoryState | memory.SoftmaxState | memory.CachedState | memory.HierarchicalState


def memory_params(
    rule: memory.Rule, key: jax.Array, num_heads: int, key_dim: int, value_dim: int, start: tuple[float, ...]
) -> PyTree:
    """`memory.init_params` with every array as a Param and the weights multiplied by `start` [heads]."""

    def one(path: jax.tree_util.KeyPath, x: jax.Array) -> nnx.Param:
        if any(getattr(entry, "name", None) == "weights" for entry in path) and x.ndim == 3:
            return param(x * jnp.asarray(start, x.dtype)[:, None, None], "heads", "memory_out", "memory_in")
        return param(x, "heads", *(None,) * (x.ndim - 1))

    initial = memory.init_params(rule, key, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)
    return jax.tree_util.tree_map_with_path(one, initial)


class MemoryHeads(Module):
    """One memory per head with its projections, without the output projection. Used by `MemoryMixer` and by hybrids.

        q, k, v = SiLU(conv(x W_qkv)),  q and k of unit length            as in DeltaNet
        y_t     = M_t(φ(q_t)),  M_t the memory after writing (k_t, v_t)   `memory.scan`, gates from x

    At initialization v has about unit length. The scale of the targets is the scale that the memory's weights must reach, and it
    determines the curvature that limits the step size.

    Args:
      config: dim, num_heads, head_dim, value_expansion, conv_width, dtype and memory.
      output_gate: whether to project an output gate SiLU(x W_gate) too, of y's shape.
      similar_keys: see `gates.initial_gates`.
      rngs: source of the initial values.

    Raises:
      ValueError: values are wider than keys, but the memory has a residual.
    """

    takes_memory: ClassVar[bool] = True  # its rule is that of `ModelConfig.memory`

    def __init__(self, config: ModelConfig, *, output_gate: bool = False, similar_keys: bool = False, rngs: nnx.Rngs):
        dim, heads, head_dim, expansion = config.dim, config.num_heads, config.resolved_head_dim, config.value_expansion
        inner = heads * head_dim
        self.heads = heads
        self.dtype = jnp.dtype(config.dtype)
        rule = config.memory.build().for_unit_keys(head_dim)
        self.rule: memory.Rule = rule
        self.implementation = config.memory.implementation
        self.truncation = config.memory.truncation
        if rule.has_residual and expansion > 1:
            raise ValueError(
                f"ModelConfig: value_expansion={expansion} needs a memory without a residual; that of rule "
                f'{config.memory.rule!r} adds its input to its output. memory.structure="plain_mlp" or "matrix" does not.'
            )
        # q, k, v and output gate in one matmul; v and the gate are `expansion` times as wide as q and k.
        scales = [1.0, 1.0] + [config.value_dim**-0.5] * expansion + [1.0] * (expansion if output_gate else 0)
        self.inputs = Linear((dim, len(scales), inner), ("embed", None, "heads"), rngs=rngs)
        self.inputs.kernel[...] = self.inputs.kernel[...] * jnp.array(scales, jnp.float32)[None, :, None]
        self.conv = CausalConv(config.conv_width, (2 + expansion, inner), (None, "heads"), rngs=rngs)
        self.gates = GateProjection(
            self.rule, dim=dim, num_heads=heads, key_dim=head_dim, value_dim=config.value_dim,
            max_step=config.memory.max_step, similar_keys=similar_keys, rngs=rngs,
        )  # fmt: skip
        self.undivided = rule.undivided  # see `mixers.check_divided`
        self.key_dim, self.value_dim = head_dim, config.value_dim
        self.memory = nnx.data(
            memory_params(self.rule, rngs.params(), heads, head_dim, config.value_dim, self.gates.start_scale)
        )

    @property
    def memory_call(self) -> MemoryCall:
        """The call of `memory.scan` for a whole sequence."""
        return MemoryCall(self.rule, self.heads, self.key_dim, self.value_dim)

    def init_state(self, batch_size: int, max_length: int | None = None) -> MemoryMixerState:
        """The state before the first token. `max_length`: see `memory.init_state`."""
        fresh = memory.init_state(self.rule, values(self.memory), batch_size=batch_size, max_length=max_length)
        return MemoryMixerState(self.conv.init_state(batch_size, self.dtype), fresh)

    def scan(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Whole sequences from a fresh memory.

        Args:
          x: the layer input, [batch, time, dim], in the model's dtype.
          segment_ids: integers ≥ 0, [batch, time]. Memory and convolution restart where the id changes.
          max_segments: static bound on the number of segments in a row. Required under jit with `segment_ids`.

        Returns:
          y and the output gate, both [batch, time, heads, value_dim] (the gate is an empty array if there is none), and the
          size of the memory (`Rule.weight_norm`) after the last token.
        """
        q, k, v, gate, _ = self._project(x, self.conv.init_state(x.shape[0], x.dtype), segment_ids)
        y, after = memory.scan(
            self.rule, values(self.memory), None, q, k, v, self.gates(x), segment_ids=segment_ids,
            max_segments=max_segments, truncation=self.truncation, **self._execution(q, v),
        )  # fmt: skip
        return y, gate, self.rule.weight_norm(after)

    def _execution(self, q: jax.Array, v: jax.Array) -> Execution:
        return execution(self.implementation, self.rule, q, v)

    def scan_segment(self, x: jax.Array, state: MemoryMixerState) -> tuple[jax.Array, jax.Array, MemoryMixerState]:
        """`scan_from` for whole chunks from a state at the start of a chunk, by the implementation of the config."""
        q, k, v, gate, conv = self._project(x, state.conv, None)
        y, after = memory.scan(
            self.rule, values(self.memory), state.memory, q, k, v, self.gates(x), at_chunk_start=True,
            **self._execution(q, v),
        )  # fmt: skip
        return y, gate, MemoryMixerState(conv, after)

    def scan_from(
        self, x: jax.Array, states: MemoryMixerState, layer: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, MemoryMixerState]:
        """y, the output gate and the next state for the next piece of a sequence (time ≥ 1). One token uses `memory.step`.

        layer: the states are those of all layers, of which this one is read and written. None: they are a layer's own.
        """
        check_state(self, states, MemoryMixerState, "memory")
        q, k, v, gate, conv = self._project(x, take_layer(states.conv, layer), None)
        gates, params = self.gates(x), values(self.memory)
        if x.shape[1] == 1:
            q, k, v, gates = jax.tree.map(lambda a: a[:, 0], (q, k, v, gates))
            y, after = memory.step(self.rule, params, states.memory, q, k, v, gates, layer=layer)
            y = y[:, None]
        else:
            y, after = memory.scan(self.rule, params, take_layer(states.memory, layer), q, k, v, gates)
            after = put_layer(states.memory, after, layer, y)
        return y, gate, MemoryMixerState(put_layer(states.conv, conv, layer, y), after)

    def _project(
        self, x: jax.Array, conv_state: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """q, k [batch, time, heads, key_dim]; v, output gate [batch, time, heads, value_dim]; the convolution's next state."""
        inputs = self.inputs(x)
        streams = self.conv.kernel[...].shape[1]
        mixed, conv_state = self.conv(inputs[:, :, :streams], conv_state, segment_ids)
        mixed = jax.nn.silu(mixed)
        q, k = (l2_normalize(self._by_head(mixed[:, :, i : i + 1])).astype(x.dtype) for i in (0, 1))
        v, gate = self._by_head(mixed[:, :, 2:]).astype(x.dtype), jax.nn.silu(self._by_head(inputs[:, :, streams:]))
        return q, k, v, gate, conv_state

    def _by_head(self, x: jax.Array) -> jax.Array:
        """[batch, time, n, heads · head_dim] → [batch, time, heads, n · head_dim]."""
        batch, time, n, inner = x.shape
        return jnp.swapaxes(x.reshape(batch, time, n, self.heads, inner // self.heads), 2, 3).reshape(
            batch, time, self.heads, n * inner // self.heads
        )


class MemoryMixer(MemoryHeads, ObservedModule, LayerwiseModule):
    """Tokens write to and read from one memory per head.

        out = (RMSNorm(y) ⊙ SiLU(x W_gate)) W_out        y of `MemoryHeads`; one norm per head

    Args:
      config: as for `MemoryHeads`, and norm_eps, output_scale.
      similar_keys: see `gates.initial_gates`.
      rngs: source of the initial values.

    Raises:
      ValueError: values are wider than keys, but the memory has a residual.
    """

    def __init__(self, config: ModelConfig, *, similar_keys: bool = False, rngs: nnx.Rngs):
        super().__init__(config, output_gate=True, similar_keys=similar_keys, rngs=rngs)
        self.norm = RMSNorm((config.num_heads, config.value_dim), ("heads", None), config.norm_eps)
        self.out = output_projection(config, rngs)

    def observe(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """[batch, time, dim] → [batch, time, dim], and `Rule.weight_norm` [batch, heads] after the last token. Arguments as for
        `MemoryHeads.scan`."""
        y, gate, norm = self.scan(x, segment_ids, max_segments)
        return self._output(y, gate), norm

    def extend_layer(
        self, x: jax.Array, states: MemoryMixerState, layer: jax.Array | None
    ) -> tuple[jax.Array, MemoryMixerState]:
        """`extend` in the states of all layers. See `mixers.LayerwiseMixer`."""
        y, gate, states = self.scan_from(x, states, layer)
        return self._output(y, gate), states

    def _output(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        y = self.norm(y) * gate
        return self.out(y.reshape(*y.shape[:2], -1))
