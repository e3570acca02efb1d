"""LaCT as a layer: a memory that is written once per large chunk, and attention over the tokens of a chunk beside it."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import memory, rules
from atlasjax.memory.layerwise import put_layer, take_layer
from atlasjax.memory.products import dense
from atlasjax.mixers.attention import KVCache, WindowCache, segment_positions
from atlasjax.nn.attention import AttentionHeads, output_projection, require_shared_heads
from atlasjax.nn.cache_check import check_state
from atlasjax.nn.config import LaCTConfig, ModelConfig
from atlasjax.nn.layers import RMSNorm, l2_normalize
from atlasjax.nn.module import LayerwiseModule, Module
from atlasjax.nn.parameters import normal, param
from atlasjax.nn.partition import time_partition

_START_STEP, _IDENTITY, _GAIN, _KERNEL_SCALE = 1e-3, 0.5, 0.5, 0.02  # as published


class LaCTState(NamedTuple):
    """The memory's state, and the keys and values in the attention window."""

    memory: memory.LargeChunkState
    window: KVCache | WindowCache


class StartMemory(Module):
    """The learned M_0 of every head: W1, and W2 and W3 = L R + 0.5 I of a low rank, or all three as they are.

    Initially normal: W1, and whole W2 and W3, with variance 1 / in; L and R with variance 0.25 / rank and 0.25 / in.

    Args:
      config: of the memory.
      key_dim, value_dim: sizes of a head of the memory.
      rngs: source of the initial values.
    """

    def __init__(self, config: LaCTConfig, key_dim: int, value_dim: int, *, rngs: nnx.Rngs):
        heads, hidden, rank = config.heads, config.expansion * key_dim, config.rank
        whole = lambda rows, columns: param(
            normal(rngs, (heads, rows, columns), columns**-0.5), "heads", "memory_out", "memory_in"
        )
        self.W1 = whole(value_dim, hidden)
        self.is_low_rank = rank is not None
        if rank is None:
            self.W2, self.W3 = whole(hidden, key_dim), whole(hidden, key_dim)
            return
        shape = (2, heads, hidden, rank), (2, heads, rank, key_dim)
        left, right = (normal(rngs, s, _GAIN * size**-0.5) for s, size in zip(shape, (rank, key_dim), strict=True))
        self.left = param(left, None, "heads", "memory_out", "rank")
        self.right = param(right, None, "heads", "rank", "memory_in")

    def __call__(self) -> memory.MemoryParams:
        if not self.is_low_rank:
            weights = {"W1": self.W1[...], "W2": self.W2[...], "W3": self.W3[...]}
        else:
            left, right = self.left[...], self.right[...]
            product = jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)
            identity = jnp.eye(left.shape[-2], right.shape[-1], dtype=left.dtype)
            W2, W3 = product + jnp.broadcast_to(_IDENTITY * identity, product.shape)
            weights = {"W1": self.W1[...], "W2": W2, "W3": W3}
        return memory.MemoryParams(weights, None, None)


class FastWeights(Module):
    """The memory of LaCT on the queries, keys and values of attention (arXiv 2505.23884; official `LaCTSWIGLULayer`):

        q', k' = RoPE(l2(SiLU(scale ⊙ (q, k) + offset))),  v' = SiLU(v)     l2 of each head of the memory
        η = softplus(x W_η + b_η), one for each weight,  θ = σ(x W_θ + b_θ)       initially η ≈ 0.001
        out = RMSNorm(y) · SiLU(x W_s + b_s)       y = `rules.lact` of q', k', v', from the learned M_0; one norm for all heads

    The heads of the memory share out the channels of all heads of the attention. RoPE is the attention's, on the attention's heads.

    Args:
      config: dim, norm_eps, lact.
      attention: the attention whose q, k and v they are.
      rngs: source of the initial values.

    Raises:
      ValueError: the number of heads does not divide the channels.
    """

    def __init__(self, config: ModelConfig, attention: AttentionHeads, *, rngs: nnx.Rngs):
        given = config.lact
        keys, values = (attention.heads * size for size in (attention.key_dim, attention.value_dim))
        if keys % given.heads or values % given.heads:
            raise ValueError(
                f"mixer 'lact': lact.heads={given.heads} must divide the {keys} channels of the attention's queries"
                f"{'' if values == keys else f' and the {values} of its values'}."
            )
        self.rule = rules.lact(given.chunk_size, given.expansion, given.momentum, given.schedule)
        self.heads = given.heads
        self.start = StartMemory(given, keys // given.heads, values // given.heads, rngs=rngs)
        self.scale = param(jnp.ones((2, keys), jnp.float32), None, "heads")
        self.offset = param(jnp.zeros((2, keys), jnp.float32), None, "heads")
        # For each head: the step sizes of the weights, the output's scale and, with momentum, θ.
        inverse = _START_STEP + jnp.log(-jnp.expm1(-_START_STEP))  # of softplus
        bias = jnp.zeros((given.heads, 4 + given.momentum), jnp.float32).at[:, :3].set(inverse)
        self.gates = param(normal(rngs, (config.dim, *bias.shape), _KERNEL_SCALE), "embed", "heads", None)
        self.bias = param(bias, "heads", None)
        self.norm = RMSNorm((values // given.heads,), (None,), config.norm_eps)

    def tokens(
        self, attention: AttentionHeads, x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array, memory.Gates], jax.Array]:
        """q', k', v' and gates of the memory, and the scale of its output, [batch, time, heads, 1].

        q, k, v: those of the attention, before rotation. position: [batch, time], of each token in its segment.
        """
        by_head = lambda z: z.reshape(*z.shape[:2], self.heads, -1)
        fast = []
        for i, z in enumerate((q, k)):
            z = z.reshape(*z.shape[:2], -1).astype(jnp.float32)
            z = l2_normalize(by_head(jax.nn.silu(z * self.scale[None, None, i] + self.offset[None, None, i])))
            fast.append(by_head(attention.rotate(z.reshape(q.shape), position)).astype(q.dtype))
        logits = (
            dense(x.astype(jnp.float32), self.gates[...], precision=jax.lax.Precision.HIGHEST) + self.bias[None, None]
        )
        theta = jax.nn.sigmoid(logits[..., 4]) if self.rule.momentum else None
        gates = memory.Gates(step_size=jax.nn.softplus(logits[..., :3]), momentum_decay=theta)
        return (*fast, by_head(jax.nn.silu(v)), gates), jax.nn.silu(logits[..., 3:4])

    def output(self, y: jax.Array, scale: jax.Array, like: jax.Array) -> jax.Array:
        """y [batch, time, heads, …] → what is added to the attention, in its shape."""
        return (self.norm(y) * scale.astype(y.dtype)).reshape(like.shape)


class LaCTMixer(LayerwiseModule):
    """LaCT (Test-Time Training Done Right, arXiv 2505.23884): attention over a window and a memory of what lies before it.

        q, k, v = x W_qkv,  q, k = RMSNorm(q), RMSNorm(k)        over all heads together
        out = (SWA(q, k, v) + memory(q, k, v)) W_out        `AttentionHeads` and `FastWeights`

    The memory is read as it was at the start of a token's chunk, so the window must be at least as long as a chunk. By default
    it is as long: what is too recent for the memory is in the window.

    Packed documents begin chunks and positions of their own. (The official code's memory goes on from one to the next.)

    Args:
      config: as for `AttentionHeads` and `FastWeights`. attention.qk_norm must be "none" or "all", and is "all".
      rngs: source of the initial values.

    Raises:
      ValueError: the attention has a gate, sizes of its own or another norm, or the memory's heads do not divide its channels.
    """

    undivided: ClassVar[str | None] = None  # see `mixers.check_divided`

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        given = config.attention
        require_shared_heads(config, "lact")
        if given.qk_norm == "head":
            raise ValueError(
                "mixer 'lact': attention.qk_norm is 'head'; it must be 'all', as published, or 'none' for it."
            )
        window = config.lact.chunk_size if given.window is None else given.window
        attention = dataclasses.replace(given, qk_norm="all")
        self.attention = AttentionHeads(dataclasses.replace(config, attention=attention), window, rngs=rngs)
        self.memory = FastWeights(config, self.attention, rngs=rngs)
        self.out = output_projection(config, rngs)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. Arguments as for `memory.scan`."""
        q, k, v = self.attention.project(x)
        position = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        if segment_ids is not None:
            position, _ = segment_positions(segment_ids)
        tokens, scale = self.memory.tokens(self.attention, x, q, k, v, position)
        y, _ = memory.scan(
            self.memory.rule, self.memory.start(), None, *tokens, segment_ids=segment_ids, max_segments=max_segments,
            partition=time_partition(x.shape[0], self.memory.heads, x.shape[1]),
        )  # fmt: skip
        a = self.attention.attend(q, k, v, segment_ids)
        return self._output(a, y, scale)

    def init_state(self, batch_size: int, max_length: int | None = None) -> LaCTState:
        """The state before the first token. `max_length` has no effect."""
        fresh = memory.init_state(self.memory.rule, self.memory.start(), batch_size=batch_size)
        return LaCTState(fresh, self.attention.init_cache(batch_size))

    def extend_layer(self, x: jax.Array, states: LaCTState, layer: jax.Array | None) -> tuple[jax.Array, LaCTState]:
        """`extend` in the states of all layers. See `mixers.LayerwiseMixer`."""
        check_state(self, states, LaCTState, "memory", "window")
        q, k, v = self.attention.project(x)
        position = take_layer(states.window.position, layer)[:, None] + jnp.arange(x.shape[1])[None]
        tokens, scale = self.memory.tokens(self.attention, x, q, k, v, position)
        rule, params = self.memory.rule, self.memory.start()
        if x.shape[1] == 1:
            now = jax.tree.map(lambda z: z[:, 0], tokens)
            y, after = memory.step(rule, params, states.memory, *now, layer=layer)
            y = y[:, None]
        else:
            y, after = memory.scan(rule, params, take_layer(states.memory, layer), *tokens)
            after = put_layer(states.memory, after, layer, y)
        a, window = self.attention.attend_from(q, k, v, states.window, layer)
        return self._output(a, y, scale), LaCTState(after, window)

    def _output(self, a: jax.Array, y: jax.Array, scale: jax.Array) -> jax.Array:
        both = a + self.memory.output(y, scale, a)
        return self.out(both.reshape(*both.shape[:2], -1))
