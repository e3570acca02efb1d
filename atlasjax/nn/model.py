"""The language model: stacked layers run by `lax.scan`, in parallel over the sequence or streaming."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from atlasjax import check
from atlasjax.memory.check import ARRAYS, check_ids, check_segments, check_shape, check_sizes, check_time
from atlasjax.memory.products import dense
from atlasjax.mesh_axes import HEAD_AXES
from atlasjax.mixers.attention import segment_positions
from atlasjax.nn.cache_check import check_cache, check_inner
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.experts import Load
from atlasjax.nn.inner_loop import InnerLoop, InnerState
from atlasjax.nn.layers import Linear, dropout, scaled
from atlasjax.nn.mixer_check import why_not_decoded
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import normal, param
from atlasjax.nn.partition import read_table, split_tokens
from atlasjax.nn.stack import Observations, first_values, make_norm, stack_layers


class PositionedCache(NamedTuple):
    """The cache of a model with learned positions.

    Attributes:
      layers: the mixers' states, which are the whole cache of a model without learned positions.
      position: number of tokens read, which is the position of the next token, int32 [1, batch].
    """

    layers: PyTree
    position: Int[Array, "1 batch"]


class InnerCache(NamedTuple):
    """The cache of a model with an inner loop.

    Attributes:
      layers: the states of the layers before it.
      inner: the state of the inner loop.
    """

    layers: PyTree
    inner: InnerState


class LanguageModel(Module):
    """A decoder-only language model: memories that learn at test time (A §5), or other mixers, in a Llama-like block.

    To use it as a pure function, call `graphdef, params = nnx.split(model, nnx.Param)` once and `nnx.merge(graphdef, params)`
    inside jitted functions. The model has no other state. The decoding cache is an explicit argument and result. Outside jit, a
    call and its gradient are compiled once for each definition and shape.

    Args:
      config: sizes, dtype and mixers.
      rngs: source of the initial values ("params"). Projections are normal with variance 1 / fan-in. Projections to the residual
        stream are also scaled by `config.output_scale`.

    Raises:
      ValueError: a mixer is unknown or rejects the config.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.dtype = jnp.dtype(config.dtype)
        scale = config.dim**-0.5  # logits of a tied head have unit variance at initialization
        self.embedding = param(normal(rngs, (config.vocab_size, config.dim), scale), "vocab", "embed")
        table = lambda size: param(normal(rngs, (size, config.dim), scale), None, "embed")
        self.positions = None if config.max_positions is None else table(config.max_positions)
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.layers = stack_layers(config, rngs)
        self.inner = None if config.inner_loop is None else InnerLoop(config, rngs=rngs)
        self.norm = make_norm(config)
        if config.tie_embeddings:
            self.head = None
        else:
            self.head = Linear((config.dim, config.vocab_size), ("embed", "vocab"), rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        dropout_keys: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Next-token logits at every position, in parallel.

        Args:
          tokens: integers [batch, time], time ≥ 1, each ≥ 0 and below vocab_size. Under jit, where this cannot be checked,
            another one makes the logits at its place NaN, and others of its row.
          segment_ids: integers ≥ 0, [batch, time], for packed documents. All state is reset where the id changes.
          max_segments: static bound on the number of segments in a row. Required under jit with `segment_ids`.
          dropout_keys: typed PRNG keys [batch], one per row, for training with the config's dropout. None: no dropout.

        Returns:
          float32 [batch, time, vocab_size].

        Raises:
          TypeError, ValueError: an argument has a wrong dtype or shape, a token is not in the vocabulary, or there are more tokens
            than learned positions.
        """
        return self.logits(self.hidden(tokens, segment_ids, max_segments, dropout_keys=dropout_keys))

    def observe(
        self,
        tokens: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        dropout_keys: Key[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time dim"], dict[int, Float[Array, " heads"]]]:
        """Like `hidden`, and also returns the size of the memories at the end of the sequences.

        Returns:
          The input of the head, as `hidden` gives it; and layer → float32 [heads], the largest `Rule.weight_norm` in the batch, for
          the layers that have one, without gradient.
        """
        return self.measure(tokens, segment_ids, max_segments, dropout_keys=dropout_keys)[:2]

    def measure(
        self,
        tokens: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        dropout_keys: Key[Array, " batch"] | None = None,
        counted: Bool[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time dim"], dict[int, Float[Array, " heads"]], tuple[Load | None, ...]]:
        """Like `observe`, and also returns how tokens are spread over experts.

        `counted` are the tokens that this counts; None: all. The other arguments are those of `__call__`.

        Returns:
          What `observe` returns; and for each layer of the pattern of mixers its load in all repetitions, arrays [repetitions, …],
          or None if it has no experts.
        """
        hidden, seen = self._run(tokens, segment_ids, max_segments, dropout_keys, counted)
        norms = [one.norm for one in seen]
        # The batch may be split over devices, so one maximum covers all repetitions of a layer.
        largest = [None if norm is None else jnp.max(norm, axis=1) for norm in norms]
        repetitions = max((len(norm) for norm in largest if norm is not None), default=0)
        by_layer = {
            repetition * len(largest) + i: norm[repetition]
            for repetition in range(repetitions)
            for i, norm in enumerate(largest)
            if norm is not None
        }
        return hidden, by_layer, tuple(one.load for one in seen)

    def hidden(
        self,
        tokens: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        dropout_keys: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch time dim"]:
        """The input of the head, after the final norm: [batch, time, dim] in the model's dtype. Arguments as in `__call__`."""
        return self._run(tokens, segment_ids, max_segments, dropout_keys)[0]

    def _run(
        self, tokens: jax.Array, segment_ids: jax.Array | None, max_segments: int | None, dropout_keys: jax.Array | None,
        counted: jax.Array | None = None,
    ) -> tuple[jax.Array, Observations]:  # fmt: skip
        """Like `hidden`, and also returns what is observed of each layer of the pattern, arrays [repetitions, …]."""
        _check_tokens(tokens, self.config.vocab_size, "LanguageModel")
        if segment_ids is not None and check_ids(segment_ids, tokens.shape, "LanguageModel") is not None:
            max_segments = check_segments(segment_ids, max_segments, tokens, "LanguageModel")
        parts = self._parts(tokens)
        if parts is None:
            return self._run_layers(tokens, segment_ids, max_segments, dropout_keys, counted)
        return _compiled_run(*parts, tokens, segment_ids, max_segments, dropout_keys, counted)

    def _run_layers(
        self, tokens: jax.Array, segment_ids: jax.Array | None, max_segments: int | None, dropout_keys: jax.Array | None,
        counted: jax.Array | None,
    ) -> tuple[jax.Array, Observations]:  # fmt: skip
        """`_run` after its checks."""
        graphdef, params = nnx.split(self.layers, nnx.Param)
        keys, layer_keys = self._dropout_keys(tokens, dropout_keys)

        x = dropout(self._embed(tokens, self._positions(tokens, segment_ids)), self.config.dropout, keys)
        first = first_values(graphdef, params, x, None, segment_ids)

        def layer(x: jax.Array, xs: tuple[PyTree, jax.Array | None]) -> tuple[jax.Array, Observations]:
            params, keys = xs
            return nnx.merge(graphdef, params).observe(x, segment_ids, max_segments, keys, first, counted)

        x, seen = jax.lax.scan(layer, x, (params, layer_keys))
        if self.inner is not None:
            x = self.inner(x, tokens, segment_ids, max_segments, self._head)
        return self.norm(x), seen

    def _head(self, x: jax.Array) -> jax.Array:
        """The output of the last layer → logits."""
        return self.logits(self.norm(x))

    def logits(self, hidden: Float[Array, "*tokens dim"]) -> Float[Array, "*tokens vocab"]:
        """The head: [..., dim] → float32 [..., vocab_size]."""
        kernel = self.embedding[...].T if self.head is None else self.head.kernel[...]
        return scaled(dense(hidden, kernel, jnp.float32), self.config.multipliers.logits)

    def init_cache(self, batch_size: int, max_length: int | None = None) -> PyTree:
        """The cache before the first token: the mixers' states, every leaf [repetitions, batch, …].

        With learned positions the states are wrapped in a `PositionedCache`.

        Args:
          batch_size: number of sequences, ≥ 1.
          max_length: maximum number of tokens that will be read, ≥ 1. Required if a mixer keeps every token or segment, or is
            "elastic", which has matrices for every block of tokens. Logits of tokens beyond it are NaN. Most other mixers ignore
            it: the size of their states does not depend on the number of tokens read.

        Raises:
          ValueError: an argument is out of range, or max_length is None and a mixer requires it.
        """
        check_sizes("init_cache", batch_size=batch_size)
        check.integer("init_cache", "max_length", max_length, optional=True)
        graphdef, params = nnx.split(self.layers, nnx.Param)
        states = jax.vmap(lambda p: nnx.merge(graphdef, p).init_state(batch_size, max_length))(params)
        return self._whole_cache(states, batch_size, max_length)

    def _whole_cache(self, states: PyTree, batch_size: int, max_length: int | None) -> PyTree:
        """The cache before the first token, with these states of the layers."""
        cache = states if self.inner is None else InnerCache(states, self.inner.init_state(batch_size, max_length))
        return cache if self.positions is None else PositionedCache(cache, jnp.zeros((1, batch_size), jnp.int32))

    def extend(
        self, tokens: Int[Array, "batch time"], cache: PyTree, *, last: bool = False
    ) -> tuple[Float[Array, "batch time vocab"], PyTree]:
        """Reads the next tokens of a stream: any number of tokens for prefill, one for decoding.

        However a sequence is split into calls, the logits are those of `__call__` on the whole sequence, up to rounding.

        Args:
          tokens: integers [batch, time], time ≥ 1, as for `__call__`.
          cache: from `init_cache` or the previous `extend`.
          last: whether only the logits after the last token are wanted, as of a prompt. With a large vocabulary the others are
            much of the work.

        Returns:
          logits float32 [batch, time, vocab_size], with `last` [batch, 1, vocab_size]; and the next cache, of the same size.

        Raises:
          TypeError, ValueError: an argument has a wrong dtype or shape, a token is not in the vocabulary, or a mixer does
            not decode.
        """
        if (why := why_not_decoded(self.config)) is not None:
            raise ValueError(f"The model decodes no tokens: {why}")
        _check_tokens(tokens, self.config.vocab_size, "extend")
        self._check_cache(cache, tokens.shape[0])
        parts = self._parts(tokens)
        if parts is None:
            return self._extend_layers(tokens, cache, last)
        return _compiled_extend(*parts, tokens, cache, last)

    def _check_cache(self, cache: PyTree, batch: int) -> None:
        if self.positions is not None:
            check.instance("extend", "cache", cache, PositionedCache)
            check_shape("cache.position", cache.position, (1, batch), "extend")
            cache = cache.layers
        have = {x.shape[1] for x in jax.tree.leaves(cache) if isinstance(x, ARRAYS) and x.ndim > 1}
        if have - {batch}:
            raise ValueError(f"extend: tokens have batch size {batch}, but the cache has batch size {have}.")
        if self.inner is not None:
            check.instance("extend", "cache", cache, InnerCache)
            check_inner(functools.partial(self.inner.init_state, batch, 1), cache.inner, "extend")
            cache = cache.layers
        check_cache(self.layers, cache, batch, "extend")

    def _extend_layers(self, tokens: jax.Array, cache: PyTree, last: bool) -> tuple[jax.Array, PyTree]:
        """`extend` after its checks."""

        def run_all(x: jax.Array, cache: PyTree) -> tuple[jax.Array, PyTree]:
            if self.inner is None:
                return self._extend_stack(x, cache)
            x, layers = self._extend_stack(x, cache.layers)
            x, inner = self.inner.extend(x, tokens, cache.inner, self._head)
            return x, InnerCache(layers, inner)

        time = tokens.shape[1]
        if self.positions is None:
            x, cache = run_all(self._embed(tokens, None), cache)
        else:
            position = cache.position[0, :, None] + jnp.arange(time)[None]
            x, layers = run_all(self._embed(tokens, position), cache.layers)
            cache = PositionedCache(layers, cache.position + time)
        return self._head(x[:, -1:] if last else x), cache

    def _extend_stack(self, x: jax.Array, states: PyTree) -> tuple[jax.Array, PyTree]:
        """The output of the layers, and their next states."""
        graphdef, params = nnx.split(self.layers, nnx.Param)
        first = first_values(graphdef, params, x, states, None)

        def layer(carry: tuple[jax.Array, PyTree], xs: PyTree) -> tuple[tuple[jax.Array, PyTree], None]:
            return nnx.merge(graphdef, xs[0]).extend(*carry, xs[1], first), None

        # The states are carried, and not an input and an output of each layer, so that XLA writes them in place.
        number = jnp.arange(jax.tree.leaves(params)[0].shape[0])
        return jax.lax.scan(layer, (x, states), (params, number))[0]

    def _parts(self, tokens: jax.Array) -> tuple[nnx.GraphDef, nnx.State] | None:
        """The static definition and the parameters, with which a call outside jit compiles itself.

        None under jit; and where an attribute is something else than parameters and hashable values, such as a function in place of
        the norm: then there is no static definition.
        """
        if isinstance(tokens, jax.core.Tracer):
            return None
        graphdef, params, *others = nnx.split(self, nnx.Param, ...)
        try:
            hash(graphdef)
        except TypeError:
            return None
        return None if any(others) else (graphdef, params)

    def check_length(self, length: int, where: str) -> None:
        """Raises ValueError if `length` exceeds the number of learned positions. The message starts with `where`."""
        longest = self.config.max_positions
        if longest is not None and length > longest:
            raise ValueError(
                f"{where}: {length} tokens, but the model has learned positions for max_positions={longest}."
            )

    def _positions(self, tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array | None:
        """Position of each token in its sequence or segment, int32 [batch, time]. None without learned positions."""
        if self.positions is None:
            return None
        if segment_ids is not None:
            return segment_positions(segment_ids)[0]
        self.check_length(tokens.shape[1], "LanguageModel")
        return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def _embed(self, tokens: jax.Array, position: jax.Array | None) -> jax.Array:
        # An id outside the vocabulary gets NaN: under jit it cannot be refused, and a negative id would count from the end.
        table = read_table(self.embedding[...], HEAD_AXES)
        x = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        if self.positions is not None:
            table = read_table(self.positions[...])
            x = x + table.at[position].get(mode="fill", fill_value=jnp.nan)  # beyond the table: NaN
        x = scaled(x.astype(self.dtype), self.config.multipliers.embedding)
        return split_tokens(x if self.embedding_norm is None else self.embedding_norm(x))

    def _dropout_keys(
        self, tokens: jax.Array, dropout_keys: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Keys [batch] for the embedding and [repetitions, batch] for the layers. None without dropout."""
        if dropout_keys is None or not self.config.dropout:
            return None, None
        is_array = isinstance(dropout_keys, ARRAYS)
        typed = is_array and jnp.issubdtype(dropout_keys.dtype, jax.dtypes.prng_key)
        if not typed or dropout_keys.shape != tokens.shape[:1]:
            what = f"{dropout_keys.dtype} {dropout_keys.shape}" if is_array else f"a {type(dropout_keys).__name__}"
            raise ValueError(
                f"LanguageModel: dropout_keys is {what}, must be typed PRNG keys (jax.random.key) of shape {tokens.shape[:1]}, "
                "one for each row."
            )
        repetitions = self.config.num_layers // len(self.config.pattern)
        keys = jax.vmap(lambda key: jax.random.split(key, 1 + repetitions), out_axes=1)(dropout_keys)
        return keys[0], keys[1:]


# Outside jit the loop over layers would be compiled again by every call, and so would its gradient.
@functools.partial(jax.jit, static_argnames=("graphdef", "max_segments"))
def _compiled_run(
    graphdef: nnx.GraphDef, params: nnx.State, tokens: jax.Array, segment_ids: jax.Array | None, max_segments: int | None,
    dropout_keys: jax.Array | None, counted: jax.Array | None,
) -> tuple[jax.Array, Observations]:  # fmt: skip
    return nnx.merge(graphdef, params)._run_layers(tokens, segment_ids, max_segments, dropout_keys, counted)


@functools.partial(jax.jit, static_argnames=("graphdef", "last"))
def _compiled_extend(
    graphdef: nnx.GraphDef, params: nnx.State, tokens: jax.Array, cache: PyTree, last: bool
) -> tuple[jax.Array, PyTree]:
    return nnx.merge(graphdef, params)._extend_layers(tokens, cache, last)


def _check_tokens(tokens: jax.Array, vocab_size: int, where: str) -> None:
    if not isinstance(tokens, ARRAYS):
        raise TypeError(f"{where}: tokens must be an integer array [batch, time], got {type(tokens).__name__}.")
    check.plain_array(where, "tokens", tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{where}: tokens must be integers, got {tokens.dtype}.")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"{where}: tokens has shape {tokens.shape}, must be [batch ≥ 1, time ≥ 1].")
    check_time("tokens", tokens.shape[1], where)
    if isinstance(tokens, jax.core.Tracer) or not getattr(tokens, "is_fully_addressable", True):
        return
    ids = np.asarray(tokens)
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"{where}: tokens has the id {wrong}, must be ≥ 0 and below vocab_size={vocab_size}.")
