"""The inner loop: the last layers of a model have feed-forward networks that are trained on the text that the model reads.

    y_t = layers(x_t; W)                                          for all tokens of a chunk with the same fast weights W
    ℓ = mean_t −log p(token_{t+1} | y_t)                          over the chunk; its last target is the next chunk's first token
    W_i ← W_i − η clip(mean of ∂ℓ/∂W_i since W_i's last step)     if a period of W_i ends with the chunk

With one period this is TTT-E2E (arXiv 2512.23675, github.com/test-time-training/e2e); with several, a layer's networks are the
continuum memory system of HOPE (Nested Learning, Eq. 30 and 31). Every sequence, and every packed document, has fast weights of its
own, which begin with the learned ones. The outer gradient goes through all steps.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from atlasjax.memory.grid import aligned_layout, lay_chunks, pick_chunks, segmented_layout
from atlasjax.memory.products import product
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import SwiGLU
from atlasjax.nn.module import Module
from atlasjax.nn.stack import Layer, LayerState, make_norm, stacked

T = TypeVar("T")  # a pytree
Head = Callable[[jax.Array], jax.Array]  # the output of the last layer → logits


class FastWeights(NamedTuple):
    """The weights of a SwiGLU network of each layer and sequence, float32.

    Attributes:
      gate_and_wide: [layers, batch, dim, 2, hidden].
      out: [layers, batch, hidden, dim].
    """

    gate_and_wide: jax.Array
    out: jax.Array


class Progress(NamedTuple):
    """The weights and states that read a chunk's tokens. Every array is [layers, batch, …] but `chunks`.

    Attributes:
      weights: the fast weights of each period.
      gradients: their gradients since their last step, summed over chunks. None for a period of one chunk.
      chunks: int32 [1, batch], the number of chunks that the weights have been trained on.
      states: the mixers' states before the chunk.
    """

    weights: tuple[FastWeights, ...]
    gradients: tuple[FastWeights | None, ...]
    chunks: jax.Array
    states: PyTree


class InnerState(NamedTuple):
    """The state of a stream that may be anywhere in a chunk.

    Attributes:
      start: at the chunk's start.
      states: the mixers' states after the tokens read, [layers, batch, …].
      inputs: the inputs of the first layer in this chunk, [1, batch, chunk, dim].
      tokens: its tokens, int32 [1, batch, chunk].
      filled: how many there are, int32 [1, batch]. A full chunk waits for the next token, which its loss needs.
    """

    start: Progress
    states: PyTree
    inputs: jax.Array
    tokens: jax.Array
    filled: jax.Array


class FastMLP(Module):
    """x + norm(mlp(norm(x))), where the weights of mlp, SwiGLU, are fast. Those here are their initial values.

    Args:
      config: the model's config, with an inner loop.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.inner_loop is not None
        hidden = config.inner_loop.mlp_dim or config.resolved_mlp_dim
        self.norm, self.post_norm = make_norm(config), make_norm(config)
        self.mlp = SwiGLU(config.dim, hidden, rngs=rngs)

    def __call__(self, x: jax.Array, weights: FastWeights) -> jax.Array:
        """[batch, time, dim] → the same shape and dtype, with each sequence's own weights [batch, …]."""
        inner, outer = (w.astype(x.dtype) for w in weights)
        h = product(self.norm(x), inner.reshape(*inner.shape[:2], -1), "nn", x.dtype)
        gate, wide = jnp.split(h, 2, axis=-1)
        return x + self.post_norm(product(jax.nn.silu(gate) * wide, outer, "nn", x.dtype))

    @property
    def initial(self) -> FastWeights:
        """The weights that every sequence begins with, without an axis of the batch."""
        return FastWeights(self.mlp.gate_and_wide.kernel[...], self.mlp.out.kernel[...])


class FastLayer(Layer):
    """x + mixer(norm(x)), then one `FastMLP` for each period, then x + ffn(norm(x)).

    Args:
      config: the model's config, with an inner loop.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, 0, rngs=rngs)
        assert config.inner_loop is not None
        self.levels = len(config.inner_loop.periods)
        for i in range(self.levels):
            setattr(self, f"fast_{i}", FastMLP(config, rngs=rngs))

    @property
    def fast(self) -> list[FastMLP]:
        """The networks with fast weights, in their order."""
        return [getattr(self, f"fast_{i}") for i in range(self.levels)]

    def read(self, x: jax.Array, state: PyTree, weights: tuple[FastWeights, ...]) -> tuple[jax.Array, PyTree]:
        """The output for the next piece of a sequence, and the layer's next state, with fast weights [batch, …]."""
        before = state if isinstance(state, LayerState) else LayerState(state, None)

        def adapted(x: jax.Array) -> jax.Array:
            for mlp, own in zip(self.fast, weights, strict=True):
                x = mlp(x, own)
            return x

        mix, feed = lambda x: self.mixer.extend(x, before.mixer), lambda x: self._feed(x, before.mlp)
        y, mixer, mlp = self._around(mix, feed, x, between=adapted)
        after = LayerState(mixer, mlp) if isinstance(state, LayerState) else mixer
        return y, jax.tree.map(lambda new, old: new.astype(old.dtype), after, state)


class InnerLoop(Module):
    """The last layers of a model, and the inner loop that trains their fast weights.

    Args:
      config: the model's config, with an inner loop.
      rngs: source of the initial values.

    Raises:
      ValueError: the mixer uses the values of the model's first layer.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.inner_loop is not None
        own = config.inner_loop
        self.dim, self.dtype, self.chunk = config.dim, jnp.dtype(config.dtype), own.chunk
        self.multiples = tuple(period // own.chunk for period in own.periods)
        self.learning_rate, self.clip = own.learning_rate, own.clip
        self.layers = stacked(lambda rngs: FastLayer(config, rngs=rngs), own.layers_of(config.num_layers), rngs)
        if self.layers.has_first_values:
            raise ValueError(
                f"ModelConfig: inner_loop is given, but mixer={config.mixer!r} uses the values of the first layer; give "
                "rwkv7.value_residual=False."
            )

    def init_state(self, batch: int, max_length: int | None = None) -> InnerState:
        """The state before the first token. max_length: as for `Mixer.init_state`."""
        start = self._start(batch, max_length)
        return InnerState(
            start,
            jax.tree.map(jnp.copy, start.states),  # each array once, so that a loop can write all of them in place
            jnp.zeros((1, batch, self.chunk, self.dim), self.dtype),
            jnp.zeros((1, batch, self.chunk), jnp.int32),
            jnp.zeros((1, batch), jnp.int32),
        )

    def __call__(
        self, x: jax.Array, tokens: jax.Array, segment_ids: jax.Array | None, max_segments: int | None, head: Head
    ) -> jax.Array:
        """Whole sequences.

        Args:
          x: the output of the layers before these, [batch, time, dim].
          tokens: int32 [batch, time].
          segment_ids, max_segments: as for `LanguageModel.__call__`.
          head: see `Head`.

        Returns:
          The output of the last layer, [batch, time, dim].
        """
        batch, time = tokens.shape
        chunk, zeros = min(self.chunk, time), jnp.zeros(batch, jnp.int32)
        if segment_ids is None:
            layout = aligned_layout(batch, time, chunk, 1, zeros)
        else:
            assert max_segments is not None
            layout = segmented_layout(segment_ids, max_segments, chunk, chunk, 1, zeros, zeros, zeros - 1)
        slots = layout.num_slots
        laid = [lay_chunks(y, slots, chunk, layout.place) for y in (x, jnp.roll(tokens, -1, axis=1))]
        resets = jnp.zeros((slots, batch), bool) if layout.resets is None else layout.resets
        fresh = self._start(batch, slots * chunk)

        def begin(before: Progress, reset: jax.Array) -> Progress:
            if layout.resets is None:
                return before
            return _choose(reset, fresh, before)

        def step(before: Progress, slot: tuple[jax.Array, ...]) -> tuple[Progress, jax.Array]:
            x, targets, reset = slot
            return self._learn(begin(before, reset), x, targets, head)

        # The last chunk is only read: no token comes after it.
        before_last = tuple(y[:-1] for y in (*laid, resets))
        # The backward pass keeps the fast weights before each chunk and computes the chunk again.
        progress, ys = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), fresh, before_last)
        end = begin(progress, resets[-1])
        y = self._read(end.weights, end.states, laid[0][-1])[0]
        return pick_chunks(jnp.concatenate([ys, y[None]]), time, layout.place)

    def extend(self, x: jax.Array, tokens: jax.Array, state: InnerState, head: Head) -> tuple[jax.Array, InnerState]:
        """Like `__call__`, for the next piece of a sequence. Also returns the next state."""
        time = tokens.shape[1]

        def piece(state: InnerState, piece: tuple[jax.Array, ...]) -> tuple[InnerState, jax.Array]:
            x, tokens = piece
            together = lambda state: self._piece(state, x, tokens, head)
            if tokens.shape[1] == 1:
                return together(state)

            def apart(state: InnerState) -> tuple[InnerState, jax.Array]:
                step = lambda state, token: self._piece(state, token[0][:, None], token[1][:, None], head)
                state, ys = jax.lax.scan(step, state, (jnp.moveaxis(x, 1, 0), tokens.T))
                return state, jnp.moveaxis(ys[:, :, 0], 0, 1)

            # A piece that begins a chunk in all rows is read at once; in any other a chunk ends somewhere.
            return jax.lax.cond(jnp.all(state.filled % self.chunk == 0), together, apart, state)

        whole = time // self.chunk
        ys = []
        if whole:
            cut = [y[:, : whole * self.chunk] for y in (x, tokens)]
            state, y = jax.lax.scan(piece, state, tuple(lay_chunks(y, whole, self.chunk) for y in cut))
            ys.append(pick_chunks(y, whole * self.chunk))
        if time % self.chunk:
            state, y = piece(state, (x[:, whole * self.chunk :], tokens[:, whole * self.chunk :]))
            ys.append(y)
        return jnp.concatenate(ys, axis=1), state

    def _piece(self, state: InnerState, x: jax.Array, tokens: jax.Array, head: Head) -> tuple[InnerState, jax.Array]:
        """`extend` for tokens [batch, time] that are all in one chunk."""
        full = state.filled[0] == self.chunk

        def learn(state: InnerState) -> InnerState:
            targets = jnp.concatenate([state.tokens[0, :, 1:], tokens[:, :1]], axis=1)
            start = self._learn(state.start, state.inputs[0], targets, head)[0]._replace(states=state.states)
            after = state._replace(start=start, filled=jnp.zeros_like(state.filled))
            return _choose(full, after, state)

        state = jax.lax.cond(jnp.any(full), learn, lambda state: state, state)
        y, states = self._read(state.start.weights, state.states, x)
        count = state.filled[0]
        put = jax.vmap(lambda held, new, at: jax.lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), at, 0))
        return InnerState(
            state.start,
            states,
            put(state.inputs[0], x, count)[None],
            put(state.tokens[0], tokens, count)[None],
            (count + tokens.shape[1])[None],
        ), y

    def _start(self, batch: int, max_length: int | None) -> Progress:
        """The progress before the first chunk."""
        graphdef, params = nnx.split(self.layers, nnx.Param)
        states = jax.vmap(lambda one: nnx.merge(graphdef, one).init_state(batch, max_length))(params)
        copied = lambda w: jnp.broadcast_to(w[:, None], (w.shape[0], batch, *w.shape[1:]))
        weights = tuple(jax.tree.map(copied, mlp.initial) for mlp in self.layers.fast)
        zeros = lambda own, multiple: None if multiple == 1 else jax.tree.map(jnp.zeros_like, own)
        gradients = tuple(map(zeros, weights, self.multiples))
        return Progress(weights, gradients, jnp.zeros((1, batch), jnp.int32), states)

    def _read(self, weights: tuple[FastWeights, ...], states: PyTree, x: jax.Array) -> tuple[jax.Array, PyTree]:
        """The output of the last layer for the next tokens of one chunk, and the mixers' next states."""
        graphdef, params = nnx.split(self.layers, nnx.Param)

        def layer(x: jax.Array, xs: PyTree) -> tuple[jax.Array, PyTree]:
            params, weights, state = xs
            return nnx.merge(graphdef, params).read(x, state, weights)

        return jax.lax.scan(layer, x, (params, weights, states))

    def _learn(self, before: Progress, x: jax.Array, targets: jax.Array, head: Head) -> tuple[Progress, jax.Array]:
        """Reads a whole chunk, and takes the steps that end with it. Also returns the output of the last layer."""

        def loss(weights: tuple[FastWeights, ...]) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            y, states = self._read(weights, before.states, x)
            logits = head(y)
            of_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            losses = jax.nn.logsumexp(logits, axis=-1) - of_target
            return jnp.sum(jnp.mean(losses, axis=1)), (y, states)  # sequences have no weights in common

        gradients, (y, states) = jax.grad(loss, has_aux=True)(before.weights)
        chunks = before.chunks + 1
        steps = [
            self._step(*own, chunks[0])
            for own in zip(before.weights, gradients, before.gradients, self.multiples, strict=True)
        ]
        return Progress(tuple(new for new, _ in steps), tuple(kept for _, kept in steps), chunks, states), y

    def _step(
        self, weights: FastWeights, gradient: FastWeights, kept: FastWeights | None, multiple: int, chunks: jax.Array
    ) -> tuple[FastWeights, FastWeights | None]:
        """The weights of a period of `multiple` chunks, and the gradients that wait for its end, after the last of `chunks`."""
        total = gradient if kept is None else jax.tree.map(jnp.add, kept, gradient)
        size = _clipped(total, multiple, self.clip) * self.learning_rate / multiple
        moved = jax.tree.map(lambda w, g: w - size.reshape(1, -1, *(1,) * (g.ndim - 2)) * g, weights, total)
        if kept is None:
            return moved, None
        ends = chunks % multiple == 0
        return _choose(ends, moved, weights), _choose(ends, jax.tree.map(jnp.zeros_like, total), total)


def _clipped(total: FastWeights, multiple: int, clip: float | None) -> jax.Array:
    """By what the mean over `multiple` chunks is multiplied, so that its norm over all layers is at most `clip`: [batch]."""
    squares = sum(jnp.sum(jnp.square(g), axis=(0, *range(2, g.ndim))) for g in total) / multiple**2
    if clip is None:
        return jnp.ones_like(squares)
    above = squares > clip**2
    return jnp.where(above, clip * jax.lax.rsqrt(jnp.where(above, squares, 1.0)), 1.0)


def _choose(condition: jax.Array, a: T, b: T) -> T:
    """For each sequence, the leaves [layers, batch, …] of `a` where the condition [batch] holds, otherwise those of `b`."""
    expand = lambda x: condition.reshape(1, -1, *(1,) * (x.ndim - 2))
    return jax.tree.map(lambda x, y: jnp.where(expand(x), x, y), a, b)
