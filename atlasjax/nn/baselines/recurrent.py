"""What the baselines share: project tokens, run a recurrence over them, project its output."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory
from atlasjax.nn.attention import output_projection
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm


class RecurrentState(NamedTuple):
    """What a baseline carries from call to call; its size does not depend on how much was read.

    Attributes:
      inputs: what the projections look back at (a convolution's last inputs, a position), in the model's dtype.
      recurrence: the recurrence's own state, float32.
    """

    inputs: Any
    recurrence: Any


class RecurrentMixer(nnx.Module):
    """A mixer in three parts, which the subclasses give:

        tokens, inputs = project(x, inputs, segment_ids)
        y, recurrence  = recur(tokens, recurrence)
        out            = output(y, tokens)

    `tokens` is whatever these agree on. The rest is the Mixer protocol.
    """

    dtype: jnp.dtype

    def start_inputs(self, batch_size: int, dtype: Any) -> Any:
        """What `project` looks back at before the first token."""
        raise NotImplementedError

    def start_recurrence(self, batch_size: int) -> Any:
        """The recurrence's state before the first token."""
        raise NotImplementedError

    def project(self, x: jax.Array, inputs: Any, segment_ids: jax.Array | None) -> tuple[Any, Any]:
        """[batch, time, dim] → tokens, and what the next call looks back at."""
        raise NotImplementedError

    def recur(
        self, tokens: Any, state: Any, segment_ids: jax.Array | None, max_segments: int | None
    ) -> tuple[jax.Array, Any]:
        """Tokens → y and the next state; `state` None is a fresh one."""
        raise NotImplementedError

    def output(self, y: jax.Array, tokens: Any) -> jax.Array:
        """y → [batch, time, dim]."""
        raise NotImplementedError

    def init_state(self, batch_size: int, max_length: int | None = None) -> RecurrentState:
        """The state before the first token; `max_length` has no effect."""
        return RecurrentState(self.start_inputs(batch_size, self.dtype), self.start_recurrence(batch_size))

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences from a fresh state: [batch, time, dim] → [batch, time, dim].

        Args:
          x: the layer input, in the model's dtype.
          segment_ids: integers ≥ 0, [batch, time]; nothing reaches over a change of the id.
          max_segments: static bound on the segments of a row; needed under jit with `segment_ids`.
        """
        tokens, _ = self.project(x, self.start_inputs(x.shape[0], x.dtype), segment_ids)
        y, _ = self.recur(tokens, None, segment_ids, max_segments)
        return self.output(y, tokens)

    def extend(self, x: jax.Array, state: RecurrentState) -> tuple[jax.Array, RecurrentState]:
        """The next piece of a sequence, any time ≥ 1."""
        tokens, inputs = self.project(x, state.inputs, None)
        y, recurrence = self.recur(tokens, state.recurrence, None, None)
        return self.output(y, tokens), RecurrentState(inputs, recurrence)


class Tokens(NamedTuple):
    """Tokens of a matrix memory: q, k, v and gates as `memory.scan` takes them; `rest`, what only the output needs."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gates: memory.Gates
    rest: Any = None


class MatrixMixer(RecurrentMixer):
    """A `RecurrentMixer` whose recurrence is a memory rule with a matrix for each head, which starts at zero and is not learned.

    Subclasses set `rule`, `num_heads`, `key_dim` and `value_dim`.
    """

    rule: memory.MemoryRule
    num_heads: int
    key_dim: int
    value_dim: int

    def start_recurrence(self, batch_size: int) -> memory.MemoryState:
        return start_memory(self.rule, batch_size, self.num_heads, self.key_dim, self.value_dim)

    def recur(
        self, tokens: Tokens, state: Any, segment_ids: jax.Array | None, max_segments: int | None
    ) -> tuple[jax.Array, memory.MemoryState]:
        return run_memory(self.rule, tokens, state, segment_ids, max_segments)


def _zero(num_heads: int, key_dim: int, value_dim: int) -> memory.MemoryParams:
    return memory.MemoryParams({"W": jnp.zeros((num_heads, value_dim, key_dim))}, None, None)


def start_memory(
    rule: memory.MemoryRule, batch_size: int, num_heads: int, key_dim: int, value_dim: int
) -> memory.MemoryState:
    """The state of a matrix memory that starts at zero."""
    return memory.init_state(rule, _zero(num_heads, key_dim, value_dim), batch_size=batch_size)


def run_memory(
    rule: memory.MemoryRule,
    tokens: Tokens,
    state: memory.MemoryState | None,
    segment_ids: jax.Array | None,
    max_segments: int | None,
) -> tuple[jax.Array, memory.MemoryState]:
    """`memory.scan` of a matrix memory that starts at zero; `memory.step` for one token of a stream."""
    q, k, v, gates, _ = tokens
    params = _zero(q.shape[2], q.shape[3], v.shape[3])
    if state is not None and q.shape[1] == 1:
        q, k, v, gates = jax.tree.map(lambda a: a[:, 0], (q, k, v, gates))
        y, state = memory.step(rule, params, state, q, k, v, gates)
        return y[:, None], state
    return memory.scan(rule, params, state, q, k, v, gates, segment_ids=segment_ids, max_segments=max_segments)


class HeadsMixer(MatrixMixer):
    """A `MatrixMixer` with heads as attention has them; `tokens.rest` is the output gate's logits, or None.

        out = (RMSNorm(y) ⊙ SiLU(rest)) W_out        one norm for each head

    Args:
      config: dim, num_heads, head_dim (of keys), value_expansion (value_dim = value_expansion · head_dim), norm_eps, num_layers
        (for W_out's initial scale), dtype.
      rule: the memory rule.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, rule: memory.MemoryRule, *, rngs: nnx.Rngs):
        self.rule = rule
        self.num_heads = config.num_heads
        self.key_dim = config.resolved_head_dim
        self.value_dim = config.value_dim
        self.dtype = jnp.dtype(config.dtype)
        self.norm = RMSNorm((self.num_heads, self.value_dim), ("heads", None), config.norm_eps)
        self.out = output_projection(config, rngs, inner=self.num_heads * self.value_dim)

    def output(self, y: jax.Array, tokens: Tokens) -> jax.Array:
        y = self.norm(y)
        if tokens.rest is not None:
            y = y * jax.nn.silu(tokens.rest)
        return self.out(y.reshape(*y.shape[:2], -1))


class HeadProjections(nnx.Module):
    """Several inputs for each head in one product; with `conv_width` the first three go through SiLU(conv(·)).

    Args:
      dim: width of the layer input.
      num_heads: number of heads.
      sizes: size of each input, of one head.
      conv_width: taps of the causal convolution of the first three; None for none, and no SiLU.
      rngs: source of the initial values.
    """

    def __init__(
        self, dim: int, num_heads: int, sizes: tuple[int, ...], conv_width: int | None = None, *, rngs: nnx.Rngs
    ):
        self.ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
        self.linear = Linear((dim, num_heads, self.ends[-1]), ("embed", "heads", None), rngs=rngs)
        if conv_width is None:
            self.conv = None
        else:
            self.conv = CausalConv(conv_width, (num_heads, self.ends[2]), ("heads", None), rngs=rngs)

    def start(self, batch_size: int, dtype: Any) -> jax.Array | None:
        """The convolution's inputs before the first token; None without one."""
        return None if self.conv is None else self.conv.init_state(batch_size, dtype)

    def __call__(
        self, x: jax.Array, state: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """[batch, time, dim] → each input, [batch, time, heads, size], in x's dtype; and the convolution's next state."""
        inputs = self.linear(x)
        if self.conv is not None:
            assert state is not None
            mixed, state = self.conv(inputs[..., : self.ends[2]], state, segment_ids)
            inputs = jnp.concatenate([jax.nn.silu(mixed).astype(x.dtype), inputs[..., self.ends[2] :]], axis=-1)
        return jnp.split(inputs, self.ends[:-1], axis=-1), state


def float32_product(x: jax.Array, linear: Linear) -> jax.Array:
    """`linear(x)` in float32, for gates. A TPU's default float32 product is bfloat16: too coarse for a retention near 1."""
    return jnp.tensordot(x.astype(jnp.float32), linear.kernel[...], axes=1, precision=jax.lax.Precision.HIGHEST)


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """[batch, time] → boolean: where a segment begins that is not the row's first (that one goes on from the state)."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
