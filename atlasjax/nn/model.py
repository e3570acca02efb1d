"""The language model: stacked pre-norm layers run by `lax.scan`, in parallel over a sequence or as a stream."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import Linear, RMSNorm, SwiGLU
from atlasjax.nn.mixers import make_mixer
from atlasjax.nn.parameters import normal, param


class Layer(nnx.Module):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.mixer_norm = RMSNorm((config.dim,), ("embed",), config.norm_eps)
        self.mixer = make_mixer(config, rngs=rngs)
        self.mlp_norm = RMSNorm((config.dim,), ("embed",), config.norm_eps)
        out_scale = (2 * config.num_layers) ** -0.5
        self.mlp = SwiGLU(config.dim, config.resolved_mlp_dim, out_scale=out_scale, rngs=rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None, max_segments: int | None) -> jax.Array:
        """[batch, time, dim] → [batch, time, dim]."""
        x = x + self.mixer(self.mixer_norm(x), segment_ids, max_segments)
        return x + self.mlp(self.mlp_norm(x))

    def extend(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The next piece of a sequence, and the mixer's next state."""
        y, state = self.mixer.extend(self.mixer_norm(x), state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state


def _stack_layers(config: ModelConfig, rngs: nnx.Rngs) -> Layer:
    """All layers as one `Layer` whose every parameter has a leading axis "layers"."""
    one = nnx.eval_shape(lambda: Layer(config, rngs=nnx.Rngs(0)))
    init = lambda key: nnx.split(Layer(config, rngs=nnx.Rngs(params=key)), nnx.Param)[1]
    # One compilation instead of one for every array, also when the model is made outside jit.
    stacked = jax.jit(lambda keys: jax.lax.map(init, keys))(jax.random.split(rngs.params(), config.num_layers))
    layers = nnx.merge(nnx.split(one, nnx.Param)[0], stacked)
    for _, variable in nnx.iter_graph(layers):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(logical_axes=("layers", *variable.get_metadata("logical_axes")))
    return layers


class LanguageModel(nnx.Module):
    """A decoder-only language model whose mixers are memories that learn at test time (A §5 in a Llama-like block).

    Pure use: `graphdef, params = nnx.split(model, nnx.Param)` once, `nnx.merge(graphdef, params)` inside jitted functions. There
    is no other state: what is carried through time is the cache, an argument and a result.

    Args:
      config: sizes, dtype and memory.
      rngs: source of the initial values ("params"). Projections are normal with variance 1 / fan-in, those that write to the
        residual stream scaled by 1/√(2 num_layers).

    Raises:
      ValueError: an unknown mixer.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.dtype = jnp.dtype(config.dtype)
        scale = config.dim**-0.5  # logits of a tied head start with unit variance
        self.embedding = param(normal(rngs, (config.vocab_size, config.dim), scale), "vocab", "embed")
        self.layers = _stack_layers(config, rngs)
        self.norm = RMSNorm((config.dim,), ("embed",), config.norm_eps)
        if config.tie_embeddings:
            self.head = None
        else:
            self.head = Linear((config.dim, config.vocab_size), ("embed", "vocab"), rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Logits of the next token after every token, in parallel.

        Args:
          tokens: integers [batch, time], time ≥ 1.
          segment_ids: integers ≥ 0, [batch, time], for packed documents: where the id changes, everything starts afresh.
          max_segments: static bound on the number of segments in a row; needed under jit with `segment_ids`.

        Returns:
          float32 [batch, time, vocab_size].

        Raises:
          TypeError, ValueError: an argument of wrong dtype or shape.
        """
        return self.logits(self.hidden(tokens, segment_ids, max_segments))

    def hidden(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """What the head reads, [batch, time, dim] in the model's dtype, after the final norm; arguments as in `__call__`."""
        _check_tokens(tokens, "LanguageModel")
        if segment_ids is not None and segment_ids.shape != tokens.shape:
            raise ValueError(
                f"LanguageModel: segment_ids has shape {segment_ids.shape}, should be that of tokens, {tokens.shape}."
            )
        graphdef, params = nnx.split(self.layers, nnx.Param)

        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, params)(x, segment_ids, max_segments), None

        if self.config.remat:
            layer = jax.checkpoint(layer, prevent_cse=False)  # a scan's body cannot be merged with its recomputation
        x, _ = jax.lax.scan(layer, self._embed(tokens), params)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The head: [..., dim] → float32 [..., vocab_size]."""
        kernel = self.embedding[...].T if self.head is None else self.head.kernel[...]
        return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def init_cache(self, batch_size: int) -> Any:
        """The cache before the first token: the mixers' states, every leaf [num_layers, batch, …]; of constant size."""
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"init_cache: batch_size must be an integer ≥ 1, got {batch_size!r}.")
        graphdef, params = nnx.split(self.layers, nnx.Param)
        return jax.vmap(lambda p: nnx.merge(graphdef, p).mixer.init_state(batch_size))(params)

    def extend(self, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Read the next tokens of a stream: prefill with any number of them, decode with one.

        However a sequence is cut into calls, the logits are those of `__call__` on all of it, up to rounding.

        Args:
          tokens: integers [batch, time], time ≥ 1.
          cache: from `init_cache` or the last `extend`.

        Returns:
          logits float32 [batch, time, vocab_size], and the next cache, of the same size.

        Raises:
          TypeError, ValueError: an argument of wrong dtype or shape.
        """
        _check_tokens(tokens, "extend")
        batch = {leaf.shape[1] for leaf in jax.tree.leaves(cache)}
        if batch != {tokens.shape[0]}:
            raise ValueError(f"extend: tokens has shape {tokens.shape}, but the cache is of batch size {batch}.")
        graphdef, params = nnx.split(self.layers, nnx.Param)

        def layer(x: jax.Array, xs: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            params, state = xs
            return nnx.merge(graphdef, params).extend(x, state)

        x, cache = jax.lax.scan(layer, self._embed(tokens), (params, cache))
        return self.logits(self.norm(x)), cache

    def _embed(self, tokens: jax.Array) -> jax.Array:
        return self.embedding[...][tokens].astype(self.dtype)


def _check_tokens(tokens: jax.Array, where: str) -> None:
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{where}: tokens must be integers, got {tokens.dtype}.")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"{where}: tokens has shape {tokens.shape}, should be [batch ≥ 1, time ≥ 1].")
