"""The language model: stacked layers run by `lax.scan`, in parallel over the sequence or streaming."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax import check
from atlasjax.memory.check import ARRAYS, check_ids
from atlasjax.mesh_axes import HEAD_AXES
from atlasjax.mixers.attention import segment_positions
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import GELU, LayerNorm, Linear, RMSNorm, SwiGLU, dropout
from atlasjax.nn.mixers import make_mixer, observe
from atlasjax.nn.parameters import normal, param
from atlasjax.nn.partition import read_table, split_batch

Norms = tuple[jax.Array | None, ...]  # each layer's `memory_norm`

_NORMS: dict[str, type[RMSNorm | LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
_FFNS: dict[str, type[SwiGLU | GELU]] = {"swiglu": SwiGLU, "gelu": GELU}


def _norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    return _NORMS[config.norm]((config.dim,), ("embed",), config.norm_eps)


class Layer(nnx.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)). The config may drop the second part (`ffn`), or norm and residual (`block`).

    Args:
      config: the model's config.
      mixer: name of the mixer.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, mixer: str, *, rngs: nnx.Rngs):
        self.remat, self.dropout = config.remat, config.dropout
        self.mixer_norm = None if config.block == "bare" else _norm(config)
        self.mixer = make_mixer(mixer, config, rngs=rngs)
        ffn = _FFNS.get(config.ffn)
        self.mlp_norm = None if ffn is None else _norm(config)
        scale = config.output_scale
        self.mlp = None if ffn is None else ffn(config.dim, config.resolved_mlp_dim, out_scale=scale, rngs=rngs)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, max_segments: int | None, dropout_keys: jax.Array | None
    ) -> jax.Array:
        """[batch, time, dim] → [batch, time, dim]. `dropout_keys`: see `LanguageModel.__call__`."""
        return self.observe(x, segment_ids, max_segments, dropout_keys)[0]

    def observe(
        self, x: jax.Array, segment_ids: jax.Array | None, max_segments: int | None, dropout_keys: jax.Array | None
    ) -> tuple[jax.Array, Norms]:
        """Like `__call__`, and also returns the memory size from `mixers.observe`, as a tuple of one."""
        graphdef, params = nnx.split(self, nnx.Param)

        def run(params: Any, x: jax.Array, keys: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
            layer = nnx.merge(graphdef, params)
            return layer._around(lambda y: observe(layer.mixer, y, segment_ids, max_segments), x, keys)

        # prevent_cse is not needed: the layer is the body of a scan, where XLA cannot merge it with its recomputation.
        x, norm = (jax.checkpoint(run, prevent_cse=False) if self.remat else run)(params, x, dropout_keys)
        return x, (norm,)

    def init_state(self, batch_size: int, max_length: int | None) -> Any:
        """The mixer's state before the first token."""
        return self.mixer.init_state(batch_size, max_length)

    def extend(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The output for the next piece of a sequence, and the mixer's next state."""
        return self._around(lambda y: self.mixer.extend(y, state), x)

    def _around(
        self, mix: Callable[[jax.Array], tuple[jax.Array, Any]], x: jax.Array, keys: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        if self.mixer_norm is None:
            return mix(x)
        y, state = mix(self.mixer_norm(x))
        x = x + y
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys)
        return x, state


class Pattern(nnx.Module):
    """One repetition of a pattern: consecutive layers with different mixers, used in place of a `Layer`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.size = len(config.pattern)
        for i, mixer in enumerate(config.pattern):
            setattr(self, f"layer_{i}", Layer(config, mixer, rngs=rngs))

    def observe(
        self, x: jax.Array, segment_ids: jax.Array | None, max_segments: int | None, dropout_keys: jax.Array | None
    ) -> tuple[jax.Array, Norms]:
        """Like `Layer.observe`, with the memory size of each layer of the pattern."""
        norms: Norms = ()
        for i, layer in enumerate(self._layers()):
            keys = None if dropout_keys is None else jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(dropout_keys)
            x, norm = layer.observe(x, segment_ids, max_segments, keys)
            norms += norm
        return x, norms

    def init_state(self, batch_size: int, max_length: int | None) -> Any:
        """A tuple of the mixers' states before the first token."""
        return tuple(layer.init_state(batch_size, max_length) for layer in self._layers())

    def extend(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The output for the next piece of a sequence, and the mixers' next states."""
        states = []
        for layer, before in zip(self._layers(), state, strict=True):
            x, after = layer.extend(x, before)
            states.append(after)
        return x, tuple(states)

    def _layers(self) -> list[Layer]:
        return [getattr(self, f"layer_{i}") for i in range(self.size)]


def _stack_layers(config: ModelConfig, rngs: nnx.Rngs) -> Layer | Pattern:
    """All layers as one `Layer`, or all repetitions as one `Pattern`. Every parameter gets a leading axis "layers"."""

    def make(key: jax.Array) -> Layer | Pattern:
        rngs = nnx.Rngs(params=key)
        return Layer(config, config.pattern[0], rngs=rngs) if len(config.pattern) == 1 else Pattern(config, rngs=rngs)

    one = nnx.eval_shape(lambda: make(jax.random.key(0)))
    init = lambda key: nnx.split(make(key), nnx.Param)[1]
    keys = jax.random.split(rngs.params(), config.num_layers // len(config.pattern))
    # One compilation instead of one per array, even if the model is created outside jit.
    stacked = jax.jit(lambda keys: jax.lax.map(init, keys))(keys)
    layers = nnx.merge(nnx.split(one, nnx.Param)[0], stacked)
    for _, variable in nnx.iter_graph(layers):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(logical_axes=("layers", *variable.get_metadata("logical_axes")))
    return layers


class PositionedCache(NamedTuple):
    """The cache of a model with learned positions.

    Attributes:
      layers: the mixers' states, which are the whole cache of a model without learned positions.
      position: number of tokens read, which is the position of the next token, int32 [1, batch].
    """

    layers: Any
    position: jax.Array


class LanguageModel(nnx.Module):
    """A decoder-only language model: memories that learn at test time (A §5), or other mixers, in a Llama-like block.

    To use it as a pure function, call `graphdef, params = nnx.split(model, nnx.Param)` once and `nnx.merge(graphdef, params)`
    inside jitted functions. The model has no other state. The decoding cache is an explicit argument and result.

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
        self.layers = _stack_layers(config, rngs)
        self.norm = _norm(config)
        if config.tie_embeddings:
            self.head = None
        else:
            self.head = Linear((config.dim, config.vocab_size), ("embed", "vocab"), rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        max_segments: int | None = None,
        *,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        """Next-token logits at every position, in parallel.

        Args:
          tokens: integers [batch, time], time ≥ 1.
          segment_ids: integers ≥ 0, [batch, time], for packed documents. All state is reset where the id changes.
          max_segments: static bound on the number of segments in a row. Required under jit with `segment_ids`.
          dropout_keys: typed PRNG keys [batch], one per row, for training with the config's dropout. None: no dropout.

        Returns:
          float32 [batch, time, vocab_size].

        Raises:
          TypeError, ValueError: an argument has a wrong dtype or shape, or there are more tokens than learned positions.
        """
        return self.logits(self.hidden(tokens, segment_ids, max_segments, dropout_keys=dropout_keys))

    def observe(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        max_segments: int | None = None,
        *,
        dropout_keys: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[int, jax.Array]]:
        """Like `hidden`, and also returns the size of the memories at the end of the sequences.

        Returns:
          The input of the head, as `hidden` gives it; and layer → float32 [heads], the largest `memory_norm` in the batch, for the
          layers that have one, without gradient.
        """
        hidden, norms = self._run(tokens, segment_ids, max_segments, dropout_keys)
        # The batch may be split over devices, so one maximum covers all repetitions of a layer.
        largest = [None if norm is None else jnp.max(norm, axis=1) for norm in norms]
        repetitions = self.config.num_layers // len(largest)
        by_layer = {
            repetition * len(largest) + i: norm[repetition]
            for repetition in range(repetitions)
            for i, norm in enumerate(largest)
            if norm is not None
        }
        return hidden, by_layer

    def hidden(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        max_segments: int | None = None,
        *,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        """The input of the head, after the final norm: [batch, time, dim] in the model's dtype. Arguments as in `__call__`."""
        return self._run(tokens, segment_ids, max_segments, dropout_keys)[0]

    def _run(
        self, tokens: jax.Array, segment_ids: jax.Array | None, max_segments: int | None, dropout_keys: jax.Array | None
    ) -> tuple[jax.Array, Norms]:
        """Like `hidden`, and also returns the memory size of each layer of the pattern, [repetitions, batch, heads] or None."""
        _check_tokens(tokens, "LanguageModel")
        if segment_ids is not None:
            check_ids(segment_ids, tokens.shape, "LanguageModel")
        graphdef, params = nnx.split(self.layers, nnx.Param)
        keys, layer_keys = self._dropout_keys(tokens, dropout_keys)

        def layer(x: jax.Array, xs: tuple[Any, jax.Array | None]) -> tuple[jax.Array, Norms]:
            params, keys = xs
            return nnx.merge(graphdef, params).observe(x, segment_ids, max_segments, keys)

        x = self._embed(tokens, self._positions(tokens, segment_ids))
        x, norms = jax.lax.scan(layer, dropout(x, self.config.dropout, keys), (params, layer_keys))
        return self.norm(x), norms

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head: [..., dim] → float32 [..., vocab_size]."""
        kernel = self.embedding[...].T if self.head is None else self.head.kernel[...]
        return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def init_cache(self, batch_size: int, max_length: int | None = None) -> Any:
        """The cache before the first token: the mixers' states, every leaf [repetitions, batch, …].

        With learned positions the states are wrapped in a `PositionedCache`.

        Args:
          batch_size: number of sequences, ≥ 1.
          max_length: maximum number of tokens that will be read, ≥ 1. It is used, and required, only if a mixer keeps every token.
            The size of all other states does not depend on the number of tokens read. Logits of tokens beyond it are NaN.

        Raises:
          ValueError: an argument is out of range, or max_length is None and a mixer keeps every token.
        """
        check.integer("init_cache", "batch_size", batch_size)
        check.integer("init_cache", "max_length", max_length, optional=True)
        graphdef, params = nnx.split(self.layers, nnx.Param)
        cache = jax.vmap(lambda p: nnx.merge(graphdef, p).init_state(batch_size, max_length))(params)
        return cache if self.positions is None else PositionedCache(cache, jnp.zeros((1, batch_size), jnp.int32))

    def extend(self, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Reads the next tokens of a stream: any number of tokens for prefill, one for decoding.

        However a sequence is split into calls, the logits are those of `__call__` on the whole sequence, up to rounding.

        Args:
          tokens: integers [batch, time], time ≥ 1.
          cache: from `init_cache` or the previous `extend`.

        Returns:
          logits float32 [batch, time, vocab_size], and the next cache, of the same size.

        Raises:
          TypeError, ValueError: an argument has a wrong dtype or shape.
        """
        _check_tokens(tokens, "extend")
        batch = {leaf.shape[1] for leaf in jax.tree.leaves(cache)}
        if batch - {tokens.shape[0]}:
            raise ValueError(f"extend: tokens has shape {tokens.shape}, but the cache has batch size {batch}.")
        graphdef, params = nnx.split(self.layers, nnx.Param)

        def layer(x: jax.Array, xs: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            params, state = xs
            return nnx.merge(graphdef, params).extend(x, state)

        time = tokens.shape[1]
        if self.positions is None:
            x, cache = jax.lax.scan(layer, self._embed(tokens, None), (params, cache))
        else:
            position = cache.position[0, :, None] + jnp.arange(time)
            x, layers = jax.lax.scan(layer, self._embed(tokens, position), (params, cache.layers))
            cache = PositionedCache(layers, cache.position + time)
        return self.logits(self.norm(x)), cache

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
        x = read_table(self.embedding[...], HEAD_AXES)[tokens]
        if self.positions is not None:
            table = read_table(self.positions[...])
            x = x + table.at[position].get(mode="fill", fill_value=jnp.nan)  # beyond the table: NaN
        return split_batch(x.astype(self.dtype))

    def _dropout_keys(
        self, tokens: jax.Array, dropout_keys: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Keys [batch] for the embedding and [repetitions, batch] for the layers. None without dropout."""
        if dropout_keys is None or not self.config.dropout:
            return None, None
        if not jnp.issubdtype(dropout_keys.dtype, jax.dtypes.prng_key) or dropout_keys.shape != tokens.shape[:1]:
            raise ValueError(
                f"LanguageModel: dropout_keys is {dropout_keys.dtype} {dropout_keys.shape}, should be typed PRNG keys "
                f"(jax.random.key) of shape {tokens.shape[:1]}, one for each row."
            )
        repetitions = self.config.num_layers // len(self.config.pattern)
        keys = jax.vmap(lambda key: jax.random.split(key, 1 + repetitions), out_axes=1)(dropout_keys)
        return keys[0], keys[1:]


def _check_tokens(tokens: jax.Array, where: str) -> None:
    if not isinstance(tokens, ARRAYS):
        raise TypeError(f"{where}: tokens must be an integer array [batch, time], got {type(tokens).__name__}.")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{where}: tokens must be integers, got {tokens.dtype}.")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"{where}: tokens has shape {tokens.shape}, should be [batch ≥ 1, time ≥ 1].")
