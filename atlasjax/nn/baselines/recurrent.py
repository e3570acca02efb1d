"""Base classes of the recurrent baselines: project the tokens, run a recurrence over them, project the output."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from atlasjax import memory
from atlasjax.memory.products import dense
from atlasjax.mixers.matrix_memory import step_or_scan, zero_start
from atlasjax.nn.attention import output_projection
from atlasjax.nn.cache_check import check_state
from atlasjax.nn.caching import CacheGates
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.execution import MemoryCall, execution
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm
from atlasjax.nn.module import Module


class RecurrentState(NamedTuple):
    """The streaming state of a baseline. Its size does not depend on the number of tokens read, unless memories are cached.

    Attributes:
      inputs: state of the projections (a convolution's last inputs, or a position).
      recurrence: the recurrence's own state, float32.
    """

    inputs: PyTree
    recurrence: PyTree


class RecurrentMixer(Module):
    """A mixer in three parts, which subclasses define:

        tokens, inputs = project(x, inputs, segment_ids)
        y, recurrence  = recur(tokens, recurrence)
        out            = output(y, tokens)

    `tokens` is any pytree that the three agree on. The other methods implement the `Mixer` protocol.

    With Memory Caching (`takes_caching`), `cache` is not None and the tokens have a field `gates`, to which its gates are added.
    """

    takes_caching: ClassVar[bool] = False  # whether `ModelConfig.caching` applies to this mixer
    dtype: jnp.dtype
    cache: CacheGates | None = None

    def start_inputs(self, batch_size: int, dtype: jnp.dtype) -> PyTree:
        """The state of `project` before the first token."""
        raise NotImplementedError

    def start_recurrence(self, batch_size: int) -> PyTree:
        """The recurrence's state before the first token."""
        raise NotImplementedError

    def project(self, x: jax.Array, inputs: PyTree, segment_ids: jax.Array | None) -> tuple[PyTree, PyTree]:
        """[batch, time, dim] → tokens, and the next `inputs`."""
        raise NotImplementedError

    def recur(
        self, tokens: PyTree, state: PyTree, segment_ids: jax.Array | None, max_segments: int | None
    ) -> tuple[jax.Array, PyTree]:
        """Tokens → y and the next state. `state` None means the state before the first token."""
        raise NotImplementedError

    def output(self, y: jax.Array, tokens: PyTree) -> jax.Array:
        """y → [batch, time, dim]."""
        raise NotImplementedError

    def init_state(self, batch_size: int, max_length: int | None = None) -> RecurrentState:
        """The state before the first token. `max_length` has no effect."""
        return RecurrentState(self.start_inputs(batch_size, self.dtype), self.start_recurrence(batch_size))

    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        max_segments: int | None = None,
        **more: jax.Array | None,
    ) -> jax.Array:
        """Whole sequences from a fresh state: [batch, time, dim] → [batch, time, dim].

        Args:
          x: the layer input, in the model's dtype.
          segment_ids: integers ≥ 0, [batch, time]. All state is reset where the id changes.
          max_segments: static bound on the number of segments in a row. Required under jit with `segment_ids`.
          more: further arguments of the subclass's `project`.
        """
        tokens, _ = self._tokens(x, self.start_inputs(x.shape[0], x.dtype), segment_ids, **more)
        y, _ = self.recur(tokens, None, segment_ids, max_segments)
        return self.output(y, tokens)

    def extend(self, x: jax.Array, state: RecurrentState, **more: jax.Array | None) -> tuple[jax.Array, RecurrentState]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state."""
        check_state(self, state, RecurrentState, "recurrence")
        tokens, inputs = self._tokens(x, state.inputs, None, **more)
        y, recurrence = self.recur(tokens, state.recurrence, None, None)
        return self.output(y, tokens), RecurrentState(inputs, recurrence)

    def _tokens(
        self, x: jax.Array, inputs: PyTree, segment_ids: jax.Array | None, **more: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        """`project`, with the gates of Memory Caching."""
        tokens, inputs = self.project(x, inputs, segment_ids, **more)
        if self.cache is not None:
            tokens = tokens._replace(gates=self.cache(x, tokens.gates))
        return tokens, inputs


def with_caching(
    config: ModelConfig, rule: memory.Rule, num_heads: int, key_dim: int, rngs: nnx.Rngs
) -> tuple[memory.Rule, CacheGates | None]:
    """The rule of a recurrence with the config's Memory Caching and its gates; the rule itself and None without."""
    if config.caching is None:
        return rule, None
    cached = config.caching.around(rule)
    return cached, CacheGates(cached, config.dim, num_heads, key_dim, rngs=rngs)


class Tokens(NamedTuple):
    """Tokens of a matrix memory: q, k, v and gates as for `memory.scan`; `rest`: further inputs of `output`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gates: memory.Gates
    rest: PyTree = None


class MatrixMixer(RecurrentMixer):
    """A `RecurrentMixer` whose recurrence is a memory rule with one matrix per head, initially zero and not learned.

    Subclasses set `num_heads`, `key_dim`, `value_dim`, `implementation`, and `rule` and `cache` by `with_caching`.
    """

    takes_caching: ClassVar[bool] = True
    rule: memory.Rule
    num_heads: int
    key_dim: int
    value_dim: int
    implementation: str | None

    @property
    def memory_call(self) -> MemoryCall | None:
        """The call of `memory.scan` for a whole sequence."""
        return MemoryCall(self.rule, self.num_heads, self.key_dim, self.value_dim)

    @property
    def undivided(self) -> str | None:
        """See `mixers.check_divided`."""
        return self.rule.undivided

    def init_state(self, batch_size: int, max_length: int | None = None) -> RecurrentState:
        """The state before the first token. `max_length`: see `memory.init_state`."""
        params = self.memory_params()
        recurrence = memory.init_state(self.rule, params, batch_size=batch_size, max_length=max_length)
        return RecurrentState(self.start_inputs(batch_size, self.dtype), recurrence)

    def recur(
        self, tokens: Tokens, state: PyTree, segment_ids: jax.Array | None, max_segments: int | None
    ) -> tuple[jax.Array, PyTree]:
        params = self.memory_params()
        return run_memory(self.rule, tokens, state, segment_ids, max_segments, self.implementation, params)

    def memory_params(self) -> PyTree:
        """The parameters of the memory: a matrix that starts at zero and is not learned."""
        return zero_start(self.num_heads, self.value_dim, self.key_dim)


def run_memory(
    rule: memory.Rule,
    tokens: Tokens,
    state: PyTree,
    segment_ids: jax.Array | None,
    max_segments: int | None,
    implementation: str | None = None,
    params: PyTree = None,
) -> tuple[jax.Array, PyTree]:
    """`memory.scan` of a matrix memory that starts at zero; `memory.step` for one token of a stream.

    implementation: of whole sequences. Pieces of a stream are read as with None. params: of a rule that needs others.
    """
    q, k, v, gates, _ = tokens
    params = zero_start(q.shape[2], v.shape[3], q.shape[3]) if params is None else params
    return step_or_scan(
        rule, params, state, q, k, v, gates, segment_ids=segment_ids, max_segments=max_segments,
        **execution(implementation if state is None else None, rule, q, v),
    )  # fmt: skip


class HeadsMixer(MatrixMixer):
    """A `MatrixMixer` with the heads of attention. `tokens.rest` holds the logits of the output gate, or None.

        out = (RMSNorm(y) ⊙ SiLU(rest)) W_out        one norm per head, or another `output_gate`

    Subclasses set `inputs`.

    Args:
      config: dim, num_heads, head_dim (of keys), value_expansion (value_dim = value_expansion · head_dim), head_norm, norm_eps,
        num_layers (for W_out's initial scale), caching, dtype, memory.implementation.
      rule: the memory rule, without Memory Caching.
      num_heads: number of memories and of their outputs. None: config.num_heads.
      rngs: source of the initial values.
    """

    inputs: "HeadProjections"

    def __init__(self, config: ModelConfig, rule: memory.Rule, *, num_heads: int | None = None, rngs: nnx.Rngs):
        self.num_heads = config.num_heads if num_heads is None else num_heads
        self.key_dim = config.resolved_head_dim
        self.value_dim = config.value_dim
        self.dtype = jnp.dtype(config.dtype)
        self.implementation = config.memory.implementation
        eps = config.norm_eps if config.head_norm.eps is None else config.head_norm.eps
        if config.head_norm.shared:
            self.norm = RMSNorm((self.value_dim,), (None,), eps)
        else:
            self.norm = RMSNorm((self.num_heads, self.value_dim), ("heads", None), eps)
        self.out = output_projection(config, rngs, inner=self.num_heads * self.value_dim)
        self.rule = rule
        if type(self).takes_caching:
            self.rule, self.cache = with_caching(config, rule, self.num_heads, self.key_dim, rngs)

    def start_inputs(self, batch_size, dtype):
        return self.inputs.start(batch_size, dtype)

    def output_gate(self, logits: jax.Array) -> jax.Array:
        """The factors of the heads' outputs, from `tokens.rest`."""
        return jax.nn.silu(logits)

    def output(self, y: jax.Array, tokens: Tokens) -> jax.Array:
        y = self.norm(y)
        if tokens.rest is not None:
            y = y * self.output_gate(tokens.rest)
        return self.out(y.reshape(*y.shape[:2], -1))


def value_groups(config: str, value_heads: int, num_heads: int) -> int:
    """Heads of values for each head of keys. config: the class with value_heads, for the message.

    Raises:
      ValueError: num_heads does not divide the number of heads of values.
    """
    if value_heads % num_heads:
        raise ValueError(f"{config}: value_heads={value_heads} must be a multiple of num_heads={num_heads}.")
    return value_heads // num_heads


class HeadProjections(Module):
    """Several inputs per head in one matmul. With `conv_width` the first ones go through SiLU(conv(·)).

    Args:
      dim: width of the layer input.
      num_heads: number of heads.
      sizes: size of each input in one head.
      conv_width: taps of the causal convolution. None: neither convolution nor SiLU.
      convolved: number of inputs that it applies to.
      rngs: source of the initial values.
    """

    def __init__(
        self, dim: int, num_heads: int, sizes: tuple[int, ...], conv_width: int | None = None, convolved: int = 3, *,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        self.ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
        self.convolved = self.ends[convolved - 1]
        self.linear = Linear((dim, num_heads, self.ends[-1]), ("embed", "heads", None), rngs=rngs)
        if conv_width is None:
            self.conv = None
        else:
            self.conv = CausalConv(conv_width, (num_heads, self.convolved), ("heads", None), rngs=rngs)

    def start(self, batch_size: int, dtype: jnp.dtype) -> jax.Array | None:
        """The convolution's state before the first token. None without a convolution."""
        return None if self.conv is None else self.conv.init_state(batch_size, dtype)

    def __call__(
        self, x: jax.Array, state: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """[batch, time, dim] → the inputs, each [batch, time, heads, size] in x's dtype, and the convolution's next state."""
        inputs = self.linear(x)
        if self.conv is not None:
            assert state is not None
            mixed, state = self.conv(inputs[..., : self.convolved], state, segment_ids)
            inputs = jnp.concatenate([jax.nn.silu(mixed).astype(x.dtype), inputs[..., self.convolved :]], axis=-1)
        return jnp.split(inputs, self.ends[:-1], axis=-1), state


def float32_product(x: jax.Array, linear: Linear) -> jax.Array:
    """`linear(x)` in full float32, for gates. A TPU's default bfloat16 product is not accurate enough for a retention near 1."""
    return dense(x.astype(jnp.float32), linear.kernel[...], precision=jax.lax.Precision.HIGHEST)
