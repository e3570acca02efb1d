"""The layers of a model: norm, mixer and feed-forward network with their residual stream, stacked so that `lax.scan` runs them."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from atlasjax.memory.layerwise import put_layer, take_layer
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.experts import Experts, Load
from atlasjax.nn.layers import GELU, ChannelMixing, LayerNorm, ReLU2, RMSNorm, SwiGLU, dropout, scaled
from atlasjax.nn.mixer_check import check_own_mixers
from atlasjax.nn.mixers import FirstValuesMixer, check_caching, extend_layer, joined_sizes, make_mixer, observe
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import param


class Observed(NamedTuple):
    """What a layer tells of a batch: `Rule.weight_norm` of its memory, [batch, heads], and the load of its experts."""

    norm: jax.Array | None
    load: Load | None


Observations = tuple[Observed, ...]  # of the layers of a pattern

_NORMS: dict[str, Callable[..., RMSNorm | LayerNorm]] = {
    "rms": RMSNorm,
    "rms_plus_one": functools.partial(RMSNorm, plus_one=True),
    "layer": LayerNorm,
}
_FFNS: dict[str, type[SwiGLU | GELU | ReLU2 | ChannelMixing]] = {
    "swiglu": SwiGLU,
    "gelu": GELU,
    "relu2": ReLU2,
    "channel_mixing": ChannelMixing,
}


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """A norm of the residual stream."""
    return _NORMS[config.norm]((config.dim,), ("embed",), config.norm_eps)


S = TypeVar("S")
T = TypeVar("T")


class LayerState(NamedTuple):
    """The state of a layer whose feed-forward network has one (`mlp`), or that has a branch. For other layers the mixer's state is
    the whole state."""

    mixer: PyTree
    mlp: PyTree
    branch: PyTree = None


@runtime_checkable
class _StatefulFFN(Protocol):
    """A feed-forward network that sees earlier tokens: `__call__(x, state, segment_ids)` → (y, state)."""

    def init_state(self, batch_size: int, dtype: jnp.dtype) -> PyTree: ...

    def __call__(self, x: jax.Array, state: PyTree, segment_ids: jax.Array | None) -> tuple[jax.Array, PyTree]: ...


@runtime_checkable
class _ObservedFFN(Protocol):
    """A feed-forward network with experts: `observe(x, counted)` → (y, load)."""

    def observe(self, x: jax.Array, counted: jax.Array | None) -> tuple[jax.Array, Load]: ...


class Branch(Module):
    """λ ⊙ mixer(x): what a `BranchConfig` adds to a layer's mixer. λ [dim] is initially 0.

    Args:
      config: the model's config, with a branch.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        alone = config.branch_alone
        assert alone is not None
        self.mixer = make_mixer(alone.pattern[0], alone, rngs=rngs)
        self.scale = param(jnp.zeros(config.dim, jnp.float32), "embed")

    def observe(
        self, x: jax.Array, segment_ids: jax.Array | None, max_segments: int | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Like `mixers.observe`."""
        y, norm = observe(self.mixer, x, segment_ids, max_segments)
        return y * self.scale[None, None].astype(y.dtype), norm

    def extend(self, x: jax.Array, states: PyTree, i: jax.Array | None) -> tuple[jax.Array, PyTree]:
        """Like `mixers.extend_layer`."""
        y, states = extend_layer(self.mixer, x, states, i)
        return y * self.scale[None, None].astype(y.dtype), states


class Layer(Module):
    """x + mixer(norm(x)), then x + ffn(norm(x)). The config may drop the second part (`ffn`), move the norms to the outputs of
    mixer and ffn, drop norm and residual (`block`), and add a second mixer to the first one (`branch`).

    Args:
      config: the model's config.
      index: number of the layer in the pattern.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, index: int, *, rngs: nnx.Rngs):
        self.remat, self.dropout, self.dtype = config.remat, config.dropout, jnp.dtype(config.dtype)
        block = config.blocks[index]
        self.has_post_norm = block == "post_norm"
        self.mixer_norm = None if block == "bare" else make_norm(config)
        self.mixer = make_mixer(config.pattern[index], config, rngs=rngs)
        self.branch = None if config.branch is None else Branch(config, rngs=rngs)
        self.residual_factor = config.multipliers.residual
        self.mlp = _make_ffn(config, index, rngs)
        self.mlp_norm = None if self.mlp is None else make_norm(config)

    def observe(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None,
        max_segments: int | None,
        dropout_keys: jax.Array | None,
        first: jax.Array | None,
        counted: jax.Array | None = None,
    ) -> tuple[jax.Array, Observations]:
        """[batch, time, dim] → [batch, time, dim], and what is observed, as a tuple of one.

        `dropout_keys`: see `LanguageModel.__call__`. `first`: from the first layer's `first_values`. `counted`: see
        `LanguageModel.measure`.
        """
        graphdef, params = nnx.split(self, nnx.Param)

        def run(
            params: PyTree, x: jax.Array, keys: jax.Array | None, first: jax.Array | None
        ) -> tuple[jax.Array, Observed]:
            layer = nnx.merge(graphdef, params)
            mix = lambda y: layer._observe(y, segment_ids, max_segments, first)
            feed = lambda y: layer._feed_whole(y, segment_ids, counted)
            x, norm, load = layer._around(mix, feed, x, keys)
            return x, Observed(norm, load)

        # prevent_cse is not needed: the layer is the body of a scan, where XLA cannot merge it with its recomputation.
        x, seen = (jax.checkpoint(run, prevent_cse=False) if self.remat else run)(params, x, dropout_keys, first)
        return x, (seen,)

    def init_state(self, batch_size: int, max_length: int | None) -> PyTree:
        """The state before the first token: the mixer's, or a `LayerState`."""
        mixer = self.mixer.init_state(batch_size, max_length)
        mlp = self.mlp.init_state(batch_size, self.dtype) if isinstance(self.mlp, _StatefulFFN) else None
        branch = None if self.branch is None else self.branch.mixer.init_state(batch_size, max_length)
        return mixer if mlp is None and branch is None else LayerState(mixer, mlp, branch)

    def extend(
        self, x: jax.Array, states: PyTree, i: jax.Array | None, first: jax.Array | None
    ) -> tuple[jax.Array, PyTree]:
        """The output for the next piece of a sequence, and the next states, those of all layers, of which this is the i-th. With
        i None: its own. `first`: as for `observe`."""
        given = states if isinstance(states, LayerState) else LayerState(states, None)

        def mix(x: jax.Array) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
            y, mixer = extend_layer(self.mixer, x, given.mixer, i, first)
            if self.branch is None:
                return y, (mixer, None)
            more, branch = self.branch.extend(x, given.branch, i)
            return y + more, (mixer, branch)

        x, (mixer, branch), mlp = self._around(mix, lambda y: self._feed(y, take_layer(given.mlp, i)), x)
        after = LayerState(mixer, put_layer(given.mlp, mlp, i, x), branch)
        return x, after if isinstance(states, LayerState) else mixer

    def _observe(
        self, x: jax.Array, segment_ids: jax.Array | None, max_segments: int | None, first: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """`mixers.observe` of the mixer and the branch together. The heads of a branch's memory come after those of the mixer's."""
        y, norm = observe(self.mixer, x, segment_ids, max_segments, first)
        if self.branch is None:
            return y, norm
        more, branch_norm = self.branch.observe(x, segment_ids, max_segments)
        return y + more, joined_sizes((norm, branch_norm))

    def _feed(self, y: jax.Array, state: PyTree) -> tuple[jax.Array, PyTree]:
        """The feed-forward network on a piece of a sequence: its output and its next state."""
        assert self.mlp is not None
        return self.mlp(y, state, None) if isinstance(self.mlp, _StatefulFFN) else (self.mlp(y), None)

    def _feed_whole(
        self, y: jax.Array, segment_ids: jax.Array | None, counted: jax.Array | None
    ) -> tuple[jax.Array, Load | None]:
        """The feed-forward network on whole sequences: its output, and the load of its experts."""
        assert self.mlp is not None
        if isinstance(self.mlp, _ObservedFFN):
            return self.mlp.observe(y, counted)
        if isinstance(self.mlp, _StatefulFFN):
            return self.mlp(y, self.mlp.init_state(y.shape[0], y.dtype), segment_ids)[0], None
        return self.mlp(y), None

    @property
    def has_first_values(self) -> bool:
        """Whether the mixer has `first_values`."""
        return isinstance(self.mixer, FirstValuesMixer)

    def first_values(self, x: jax.Array, state: PyTree, segment_ids: jax.Array | None) -> jax.Array | None:
        """The mixer's `FirstValuesMixer.first_values` of a piece of a sequence."""
        assert isinstance(self.mixer, FirstValuesMixer)
        mixer = state.mixer if isinstance(state, LayerState) else state
        return self.mixer.first_values(self._before(self.mixer_norm, x), mixer, segment_ids)

    def _before(self, norm: RMSNorm | LayerNorm | None, x: jax.Array) -> jax.Array:
        """The input of the mixer or of the feed-forward network, whose norm is `norm`."""
        return x if norm is None or self.has_post_norm else norm(x)

    def _after(self, norm: RMSNorm | LayerNorm, y: jax.Array) -> jax.Array:
        """The term that is added to the residual stream, from the output y."""
        return scaled(norm(y) if self.has_post_norm else y, self.residual_factor)

    def _around(
        self,
        mix: Callable[[jax.Array], tuple[jax.Array, T]],
        feed: Callable[[jax.Array], tuple[jax.Array, S]],
        x: jax.Array,
        keys: jax.Array | None = None,
        between: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> tuple[jax.Array, T, S | None]:
        """(output, what `mix` returns beside its own, what `feed` does): the mixer and the feed-forward network, if there is one.
        `between` maps the residual stream after the mixer."""
        if self.mixer_norm is None:
            return *mix(x), None
        fed = None
        y, state = mix(self._before(self.mixer_norm, x))
        x = between(x + self._after(self.mixer_norm, y))
        if self.mlp_norm is not None:
            y, fed = feed(self._before(self.mlp_norm, x))
            x = x + dropout(self._after(self.mlp_norm, y), self.dropout, keys)
        return x, state, fed


def _make_ffn(
    config: ModelConfig, index: int, rngs: nnx.Rngs
) -> SwiGLU | GELU | ReLU2 | ChannelMixing | Experts | None:
    """The feed-forward network of a layer of the pattern."""
    if config.ffns[index] == "experts":
        return Experts(config, rngs=rngs)
    ffn = _FFNS.get(config.ffns[index])
    if ffn is None:
        return None
    multipliers = config.multipliers
    factors = {"factors": (multipliers.mlp_gate, multipliers.mlp_out)} if ffn.takes_factors else {}
    return ffn(config.dim, config.resolved_mlp_dim, out_scale=config.output_scale, **factors, rngs=rngs)


class Pattern(Module):
    """One repetition of a pattern: consecutive layers with different mixers, used in place of a `Layer`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.size = len(config.pattern)
        for i in range(self.size):
            setattr(self, f"layer_{i}", Layer(config, i, rngs=rngs))

    def observe(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None,
        max_segments: int | None,
        dropout_keys: jax.Array | None,
        first: jax.Array | None,
        counted: jax.Array | None = None,
    ) -> tuple[jax.Array, Observations]:
        """Like `Layer.observe`, with what is observed of each layer of the pattern."""
        seen: Observations = ()
        for i, layer in enumerate(self._layers()):
            keys = None if dropout_keys is None else jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(dropout_keys)
            x, new = layer.observe(x, segment_ids, max_segments, keys, first, counted)
            seen += new
        return x, seen

    def init_state(self, batch_size: int, max_length: int | None) -> PyTree:
        """A tuple of the layers' states before the first token."""
        return tuple(layer.init_state(batch_size, max_length) for layer in self._layers())

    def extend(
        self, x: jax.Array, states: PyTree, i: jax.Array | None, first: jax.Array | None
    ) -> tuple[jax.Array, PyTree]:
        """Like `Layer.extend`: the states of each layer of the pattern in all repetitions, of which this is the i-th, or
        with i None in this one."""
        after = []
        for layer, before in zip(self._layers(), states, strict=True):
            x, new = layer.extend(x, before, i, first)
            after.append(new)
        return x, tuple(after)

    @property
    def has_first_values(self) -> bool:
        """`Layer.has_first_values` of the first layer."""
        return self._layers()[0].has_first_values

    def first_values(self, x: jax.Array, state: PyTree, segment_ids: jax.Array | None) -> jax.Array | None:
        """`Layer.first_values` of the first layer."""
        return self._layers()[0].first_values(x, None if state is None else state[0], segment_ids)

    def _layers(self) -> list[Layer]:
        return [getattr(self, f"layer_{i}") for i in range(self.size)]


def stack_layers(config: ModelConfig, rngs: nnx.Rngs) -> Layer | Pattern:
    """All layers as one `Layer`, or all repetitions as one `Pattern`; those of an inner loop excepted."""
    check_caching(config)
    check_own_mixers(config)
    inner = 0 if config.inner_loop is None else config.inner_loop.layers_of(config.num_layers)

    def make(rngs: nnx.Rngs) -> Layer | Pattern:
        return Layer(config, 0, rngs=rngs) if len(config.pattern) == 1 else Pattern(config, rngs=rngs)

    return stacked(make, (config.num_layers - inner) // len(config.pattern), rngs)


M = TypeVar("M", bound=nnx.Module)


def stacked(make: Callable[[nnx.Rngs], M], number: int, rngs: nnx.Rngs) -> M:
    """So many modules as one. Every parameter gets a leading axis "layers"."""
    one = nnx.eval_shape(lambda: make(nnx.Rngs(params=jax.random.key(0))))
    init = lambda key: nnx.split(make(nnx.Rngs(params=key)), nnx.Param)[1]
    keys = jax.random.split(rngs.params(), number)
    # One compilation instead of one per array, even if the model is created outside jit.
    params = jax.jit(lambda keys: jax.lax.map(init, keys))(keys)
    layers = nnx.merge(nnx.split(one, nnx.Param)[0], params)
    for _, variable in nnx.iter_graph(layers):
        if isinstance(variable, nnx.Param):
            variable.set_metadata(logical_axes=("layers", *variable.get_metadata("logical_axes")))
    return layers


def first_values(
    graphdef: nnx.GraphDef, params: PyTree, x: jax.Array, states: PyTree, segment_ids: jax.Array | None
) -> jax.Array | None:
    """`Layer.first_values` of the first of the stacked layers, which every layer gets; None if no layer uses them.

    Args:
      graphdef, params: of the stacked layers.
      x: the input of the first layer.
      states: the stacked states before it. None: those before the first token.
      segment_ids: as for `LanguageModel.__call__`.
    """
    if not nnx.merge(graphdef, params).has_first_values:
        return None
    params, states = jax.tree.map(lambda array: array[0], (params, states))
    return nnx.merge(graphdef, params).first_values(x, states, segment_ids)
