"""Memory as a context (MAC, Titans §4.1): segments of tokens attend to what they retrieve from memory, then write to it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from atlasjax import memory
from atlasjax.memory import grid
from atlasjax.memory.check import check_segments
from atlasjax.memory.truncation import cut
from atlasjax.mixers.attention import KVCache, init_cache
from atlasjax.mixers.softmax_attention import Source, apart, softmax_attention, together
from atlasjax.nn.attention import AttentionHeads, require_shared_heads
from atlasjax.nn.cache_check import check_state
from atlasjax.nn.caching import connector_projection
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.hybrids.mag import GatedHeads
from atlasjax.nn.layers import CausalConv, Linear, RMSNorm, l2_normalize
from atlasjax.nn.memory_mixer import MemoryHeads, MemoryMixerState
from atlasjax.nn.module import ObservedModule
from atlasjax.nn.parameters import values

_KeysAndValues = tuple[jax.Array, jax.Array]
Scan = Callable[[jax.Array, MemoryMixerState], tuple[jax.Array, jax.Array, MemoryMixerState]]


class MACState(NamedTuple):
    """The streaming state of MAC.

    Attributes:
      conv: the last conv_width − 1 projections for the retrieval queries, [batch, conv_width − 1, heads · head_dim].
      memory: the memory after the last token.
      start: the memory at the start of the segment, which retrieval reads.
      tokens: keys and values of the segment's tokens; its position < segment_size is their number.
      retrieved: keys and values of the retrieved tokens.
    """

    conv: jax.Array
    memory: MemoryMixerState
    start: PyTree
    tokens: KVCache
    retrieved: KVCache


class MACMixer(ObservedModule):
    """Memory as a context (Titans Eq. 21–25), in segments of `attention.segment_size` tokens. s: the segment's start.

        h_i = M_s(q_i)                        retrieval before the segment is written; q = SiLU(conv(x W_q)) of unit length
        r_i = RMSNorm(h_i) W_r                the retrieved token
        a_i = softmax attention of x_i over [persistent, r_j for j ≤ i, x_j for j ≤ i in the segment], RoPE within the segment
        y_i = RMSNorm(a_i W_y)                written to memory token by token; k, v and gates from y as in `MemoryHeads`
        m_i = M_i(q(y_i))                     read after the write of token i
        out = (RMSNorm(a_i) ⊙ σ(RMSNorm(m_i))) W_out

    A token does not see retrieved tokens of later positions, because their queries are later tokens. x and r share the attention's
    projections. Titans' o = y ⊗ M(y) has the norms and the sigmoid of `MAGMixer`.

    Works with any rule of `rules.REGISTRY`, also with Memory Caching: where a cache has a gate `connector`, retrieval has its own
    u = x W_u, as it has its own queries. Each segment needs the memory left by the segment before, so segments run sequentially, in
    training too. Cost per token: the memory's, one more read, and attention over at most 2 · segment_size + persistent keys.
    The state is bounded unless a softmax memory keeps every token (training then keeps one copy of its cache per segment).

    Args:
      config: as for `MemoryHeads` and `AttentionHeads`, and attention.segment_size.
      rngs: source of the initial values.

    Raises:
      ValueError: the memory's chunk size does not divide the segment size, head_dim is odd, values are wider than keys but the
        memory has a residual, or the attention has a gate or sizes of its own.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        require_shared_heads(config, "mac")
        heads, inner = config.num_heads, config.num_heads * config.resolved_head_dim
        self.segment_size, self.dtype = config.attention.segment_size, jnp.dtype(config.dtype)
        rule = config.memory.build()
        if not rule.has_constant_gradient and self.segment_size % rule.chunk_size:
            raise ValueError(
                f"mixer 'mac': attention.segment_size={self.segment_size} must be a multiple of the memory's "
                f"chunk_size={rule.chunk_size} (rule {config.memory.rule!r})."
            )
        truncation = config.memory.truncation
        if truncation is not None and truncation % self.segment_size:
            raise ValueError(
                f"mixer 'mac': memory.truncation={truncation} must be a multiple of attention.segment_size={self.segment_size}."
            )
        # Segments between two at which gradients through the memory end.
        self.flow = None if truncation is None else truncation // self.segment_size
        self.queries = Linear((config.dim, inner), ("embed", "heads"), rngs=rngs)
        self.conv = CausalConv(config.conv_width, (inner,), ("heads",), rngs=rngs)
        self.connector = connector_projection(rule, config.dim, heads, config.resolved_head_dim, rngs=rngs)
        self.retrieved_norm = RMSNorm((heads, config.value_dim), ("heads", None), config.norm_eps)
        self.retrieved = Linear((heads * config.value_dim, config.dim), ("heads", "embed"), rngs=rngs)
        self.attention = AttentionHeads(config, None, rngs=rngs)
        self.written = Linear((heads * config.value_dim, config.dim), ("heads", "embed"), rngs=rngs)
        # Gives the memory's input unit RMS, as a layer's norm does. The scale of this input limits the stable step sizes.
        self.written_norm = RMSNorm((config.dim,), ("embed",), config.norm_eps)
        self.memory = MemoryHeads(config, similar_keys=True, rngs=rngs)
        self.join = GatedHeads(config, rngs=rngs)

    def observe(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Whole sequences: [batch, time, dim] → [batch, time, dim], and `Rule.weight_norm` [batch, heads] after the segment of the
        last token.

        Args:
          x: the layer input, in the model's dtype.
          segment_ids: integers ≥ 0, [batch, time], for packed documents. Where the id changes, memory, convolutions and the grid of
            segments restart.
          max_segments: static bound on the number of documents in a row. Required under jit with `segment_ids`.
        """
        batch, time, size = *x.shape[:2], self.segment_size
        queries, _ = self._queries(x, self.conv.init_state(batch, x.dtype), segment_ids)
        if segment_ids is None:
            count, place, resets = -(-time // size), None, None
            last = jnp.full(batch, count - 1)
        else:
            max_segments = check_segments(segment_ids, max_segments, x, "mixer 'mac'")
            assert max_segments is not None
            zeros = jnp.zeros(batch, jnp.int32)
            ids = jnp.asarray(segment_ids, jnp.int32)
            where = grid.segmented_layout(ids, max_segments, size, size, 1, zeros, zeros, zeros - 1)
            count, place, resets = where.num_slots, where.place, where.resets
            assert place is not None  # it is an array for packed documents
            last = place[:, -1] // size  # later segments are padding
        fresh = self.memory.init_state(batch, count * size)
        position = jnp.broadcast_to(jnp.arange(size), (batch, size))
        earlier = position[:, None, :] <= position[:, :, None]

        def segment(
            state: MemoryMixerState, inputs: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]
        ) -> tuple[MemoryMixerState, tuple[jax.Array, jax.Array | None]]:
            x, queries, reset, ends = inputs
            if ends is not None:
                state = cut(state, ends)
            if reset is not None:
                state = grid.choose(reset, fresh, state)
            q, rotated, tokens, retrieved = self._look(x, queries, state.memory, position)
            y, state = self._write(
                self._attend(q, rotated, tokens, retrieved, earlier), state, self.memory.scan_segment
            )
            return state, (y, self.memory.rule.weight_norm(state.memory))

        xs = (
            grid.lay_chunks(x, count, size, place),
            grid.lay_chunks(queries, count, size, place),
            resets,
            self._ends(count),
        )
        # The backward pass keeps the state before each segment and computes the segment again.
        _, (y, norms) = jax.lax.scan(jax.checkpoint(segment, prevent_cse=False), fresh, xs)
        if norms is not None:
            norms = jax.vmap(lambda x, last: x.at[last].get(mode="fill", fill_value=jnp.nan), in_axes=(1, 0))(
                norms, last
            )
        return grid.pick_chunks(y, time, place), norms

    def _ends(self, count: int) -> jax.Array | None:
        """The segments, among `count`, before which gradients through the memory end. None: no such segment."""
        if self.flow is None or count <= self.flow:
            return None
        number = jnp.arange(count)
        return (number > 0) & (number % self.flow == 0)

    def init_state(self, batch_size: int, max_length: int | None = None) -> MACState:
        """The state before the first token. `max_length`: see `memory.init_state`."""
        fresh = self.memory.init_state(batch_size, max_length)
        attention, size = self.attention, self.segment_size
        empty = lambda: init_cache(
            batch_size, size, attention.kv_heads, attention.key_dim, attention.value_dim, self.dtype
        )
        # Copied, because a state with leaves that share a buffer cannot be donated to a jitted call.
        start = jax.tree.map(jnp.copy, self.memory.rule.read_part(fresh.memory))
        return MACState(self.conv.init_state(batch_size, self.dtype), fresh, start, empty(), empty())

    def extend(self, x: jax.Array, state: MACState) -> tuple[jax.Array, MACState]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state.

        Whole segments inside the piece are computed at once, the tokens before and after them one by one.
        """
        check_state(self, state, MACState, "start")
        time, size = x.shape[1], self.segment_size
        queries, conv = self._queries(x, state.conv, None)
        state = state._replace(conv=conv)
        if time == 1:
            return self._token(x, queries, state)
        y = jnp.zeros_like(x)
        one_by_one = jnp.arange(time)[:, None]
        if time < 2 * size:
            return self._pieces(self._token, 1, one_by_one, time, x, queries, y, state)
        head = (size - state.tokens.position) % size
        whole = (time - head) // size
        y, state = self._pieces(self._token, 1, one_by_one[: size - 1], head, x, queries, y, state)
        starts = head[None] + jnp.arange(time // size)[:, None] * size
        y, state = self._pieces(self._segment, size, starts, head + whole * size, x, queries, y, state)
        starts = (head + whole * size)[None] + one_by_one[: size - 1]
        return self._pieces(self._token, 1, starts, time, x, queries, y, state)

    def _pieces(
        self, run: Callable[[jax.Array, jax.Array, MACState], tuple[jax.Array, MACState]], size: int, starts: jax.Array,
        end: jax.Array | int, x: jax.Array, queries: jax.Array, y: jax.Array, state: MACState,
    ) -> tuple[jax.Array, MACState]:  # fmt: skip
        """Runs consecutive pieces of `size` tokens. In each row only the pieces that start before `end` have an effect.

        Args:
          run: (x, queries, state) of a piece → (y, state).
          starts: [pieces, batch or 1], the first token of each piece in each row.
          end: [batch], or an integer.
          x, queries: of all tokens.
          y: [batch, time, dim], the array that receives the outputs.
        """
        batch, time = x.shape[:2]
        rows = jnp.arange(batch)[:, None]

        def piece(carry: tuple[jax.Array, MACState], start: jax.Array) -> tuple[tuple[jax.Array, MACState], None]:
            y, state = carry
            active = start < end
            index = start[:, None] + jnp.arange(size)[None]
            inside = jnp.minimum(index, time - 1)

            def go(y: jax.Array, state: MACState) -> tuple[jax.Array, MACState]:
                out, after = run(x[rows, inside], queries[rows, inside], state)
                y = y.at[rows, jnp.where(active[:, None], index, time)].set(out, mode="drop")
                return y, grid.choose(active, after, state)

            return jax.lax.cond(jnp.any(active), go, lambda y, state: (y, state), y, state), None

        carry, _ = jax.lax.scan(piece, (y, state), jnp.broadcast_to(starts, (len(starts), batch)))
        return carry

    def _segment(self, x: jax.Array, queries: jax.Array, state: MACState) -> tuple[jax.Array, MACState]:
        """A whole segment. Before and after it the state is at the start of a segment."""
        position = jnp.broadcast_to(jnp.arange(self.segment_size), x.shape[:2])
        earlier = position[:, None, :] <= position[:, :, None]
        q, rotated, tokens, retrieved = self._look(
            x, queries, self.memory.rule.with_read_part(state.start, state.memory.memory), position
        )
        a = self._attend(q, rotated, tokens, retrieved, earlier)
        y, after = self._write(a, state.memory, self.memory.scan_segment)
        held = lambda k, v: KVCache(together(k), together(v), state.tokens.position)
        start = self.memory.rule.read_part(after.memory)
        return y, MACState(state.conv, after, start, held(*tokens), held(*retrieved))

    def _token(self, x: jax.Array, queries: jax.Array, state: MACState) -> tuple[jax.Array, MACState]:
        """One token, anywhere in a segment."""
        position = state.tokens.position
        q, rotated, token, recalled = self._look(
            x, queries, self.memory.rule.with_read_part(state.start, state.memory.memory), position[:, None]
        )
        rows = jnp.arange(x.shape[0])
        after = (position + 1) % self.segment_size
        put = lambda old, new: old.at[rows, position].set(together(new[:, 0]))
        tokens, retrieved = (
            KVCache(put(cache.keys, k), put(cache.values, v), after)
            for cache, (k, v) in ((state.tokens, token), (state.retrieved, recalled))
        )
        earlier = (jnp.arange(self.segment_size)[None] <= position[:, None])[:, None]
        held = lambda cache: (apart(cache.keys, self.attention.kv_heads), apart(cache.values, self.attention.kv_heads))
        a = self._attend(q, rotated, held(tokens), held(retrieved), earlier)
        y, written = self._write(a, state.memory, self.memory.scan_from)
        start = grid.choose(after == 0, self.memory.rule.read_part(written.memory), state.start)
        return y, MACState(state.conv, written, start, tokens, retrieved)

    def _queries(self, x: jax.Array, conv: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Retrieval queries [batch, time, heads, head_dim], and the convolution's next state."""
        mixed, conv = self.conv(self.queries(x), conv, segment_ids)
        q = l2_normalize(jax.nn.silu(mixed).reshape(*x.shape[:2], self.attention.heads, -1))
        return q.astype(x.dtype), conv

    def _look(
        self, x: jax.Array, queries: jax.Array, start: PyTree, position: jax.Array
    ) -> tuple[jax.Array, jax.Array, _KeysAndValues, _KeysAndValues]:
        """Retrieval and projections: q, rotated q, and (rotated keys, values) of the tokens and of the retrieved tokens."""
        connector = None if self.connector is None else self.connector(x)
        h = memory.read(self.memory.rule, values(self.memory.memory), start, queries, connector)
        r = self.retrieved(self.retrieved_norm(h).reshape(*x.shape[:2], -1))
        q, k, v = self.attention.project(x)
        _, rk, rv = self.attention.project(r)
        turn = lambda z: self.attention.rotate(z, position)
        return q, turn(q), (turn(k), v), (turn(rk), rv)

    def _attend(
        self, q: jax.Array, rotated: jax.Array, tokens: _KeysAndValues, retrieved: _KeysAndValues, visible: jax.Array
    ) -> jax.Array:
        """[batch, time, heads, value_dim]. visible: [batch, time, keys], the mask for tokens and for retrieved tokens."""
        sources = [Source(rotated, k, v, visible) for k, v in (tokens, retrieved)]
        persistent = self.attention.persistent()
        if persistent is not None:
            sources.append(Source(q, persistent.keys.astype(q.dtype), persistent.values.astype(q.dtype)))
        return softmax_attention(*sources)

    def _write(self, a: jax.Array, state: MemoryMixerState, scan: Scan) -> tuple[jax.Array, MemoryMixerState]:
        """Writes the attention's output to memory, reads, and gates the output: [batch, time, dim] and the next memory state."""
        y = self.written_norm(self.written(a.reshape(*a.shape[:2], -1)))
        m, _, state = scan(y, state)
        return self.join(a, m), state
