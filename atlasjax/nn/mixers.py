"""The interface of token mixers, and the table of the library's mixers.

A mixer is a class with three methods, and a fourth, `observe`, if its memory is to be monitored. The library's mixers are listed in
`MIXERS`. A mixer of your own is passed to `ModelConfig` as a class or as "package.module:Class".
"""

import functools
import importlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from atlasjax.memory.layerwise import changed, put_layer, take_layer
from atlasjax.memory.partition import check_divided as check_divided_rule
from atlasjax.names import call_with, resolve
from atlasjax.nn.config import MIXER_NAMES, ModelConfig
from atlasjax.nn.execution import MemoryCall
from atlasjax.nn.module import ObservedModule
from atlasjax.nn.partition import NOT_DIVIDED


class Mixer(Protocol):
    """An `nnx.Module` constructed by `Class(config, rngs=rngs, **options)` from a `ModelConfig` and its `mixer_options`.

    Create its parameters with `atlasjax.nn.param` or `atlasjax.nn.Linear`, which name their axes for sharding. It has no other
    arrays, and no random numbers but those of `rngs.params()`. A mixer of your own is checked when a model is built with it.
    """

    def __call__(
        self,
        x: Float[Array, "batch time dim"],
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
    ) -> Float[Array, "batch time dim"]:
        """Whole sequences: [batch, time, dim] → the same shape and dtype. Token t sees only tokens ≤ t of its own segment."""

    def init_state(self, batch_size: int, max_length: int | None = None) -> PyTree:
        """The state before the first token: a pytree of arrays with the batch axis first. A class in it with the attribute
        `heads_axis` says which axis of its arrays is heads, so that they are divided like the heads' parameters.

        Args:
          batch_size: number of sequences.
          max_length: maximum number of tokens that will be read. Required by mixers that keep every token or segment, and by
            "elastic", which has matrices for every block of tokens. Outputs beyond it are NaN. Most other mixers ignore it.

        Raises:
          ValueError: max_length is None and the mixer requires it.
        """

    def extend(self, x: Float[Array, "batch time dim"], state: PyTree) -> tuple[Float[Array, "batch time dim"], PyTree]:
        """The output for the next piece [batch, time ≥ 1, dim], and the next state, of the same tree structure, shapes and dtypes.

        However a sequence is split into pieces, the outputs are those of `__call__` on the whole sequence, up to rounding.
        """


@runtime_checkable
class ObservedMixer(Mixer, Protocol):
    """A mixer with a memory that may grow without bound, so that training monitors its size."""

    def observe(
        self,
        x: Float[Array, "batch time dim"],
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
    ) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch heads"] | None]:
        """Like `__call__`, and also returns the size of the memory after the last token (`memory.Rule.weight_norm`): float32
        [batch, heads], without gradient, or None if this memory has no such size."""


@runtime_checkable
class FirstValuesMixer(Mixer, Protocol):
    """A mixer that may use the values of the model's first layer: its `__call__` and `extend` also take `first`."""

    def first_values(
        self, x: Float[Array, "batch time dim"], state: PyTree, segment_ids: Int[Array, "batch time"] | None
    ) -> Float[Array, "batch time ..."] | None:
        """The values of the tokens x if this is the first layer, [batch, time, …]; None if no layer uses them.

        Args:
          x: the layer input.
          state: as for `extend`. None: that before the first token.
          segment_ids: as for `__call__`.
        """


class LayerwiseMixer(Mixer, Protocol):
    """A mixer that changes little of a large state, as attention does, which adds a token to its cache. It writes into the states
    of all layers in place, where other mixers' states are taken out and put back whole.

    Only the class that defines `extend_layer` counts, not its subclasses, which may have an `extend` of their own.
    """

    def extend_layer(
        self, x: Float[Array, "batch time dim"], states: PyTree, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "batch time dim"], PyTree]:
        """Like `extend`, with the states of all layers, [layers, batch, …], of which `layer` is this one's."""


def extend_layer(
    mixer: Mixer,
    x: Float[Array, "batch time dim"],
    states: PyTree,
    layer: Int[Array, ""] | None,
    first: Float[Array, "batch time ..."] | None = None,
) -> tuple[Float[Array, "batch time dim"], PyTree]:
    """`LayerwiseMixer.extend_layer` of any mixer, or with layer None its `extend`. first: as for `observe`.

    Raises:
      ValueError: the state that `extend` returns has another tree structure, shape or dtype than the one before it.
    """
    if layer is not None and is_layerwise(mixer):
        return mixer.extend_layer(x, states, layer)
    before = take_layer(states, layer)
    y, state = mixer.extend(x, before, **with_first(mixer, first))
    if change := changed(before, state):
        raise ValueError(f"{type(mixer).__name__}.extend: the next state has {change}.")
    return y, put_layer(states, state, layer, y)


def is_layerwise(mixer: Mixer) -> TypeGuard[LayerwiseMixer]:
    """Whether the class of a mixer defines `extend_layer` itself."""
    return "extend_layer" in vars(type(mixer))


def with_first(mixer: Mixer, first: Float[Array, "batch time ..."] | None) -> dict[str, Float[Array, "batch time ..."]]:
    """The argument `first` for a mixer that takes it."""
    return {"first": first} if first is not None and isinstance(mixer, FirstValuesMixer) else {}


def observe(
    mixer: Mixer,
    x: Float[Array, "batch time dim"],
    segment_ids: Int[Array, "batch time"] | None,
    max_segments: int | None,
    first: Float[Array, "batch time ..."] | None = None,
) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch heads"] | None]:
    """A mixer's output for whole sequences, and the size of its memory [batch, heads], or None if there is none to monitor."""
    if isinstance(mixer, ObservedMixer):
        return mixer.observe(x, segment_ids, max_segments)
    return mixer(x, segment_ids, max_segments, **with_first(mixer, first)), None


def joined_sizes(sizes: Iterable[Float[Array, "batch heads"] | None]) -> Float[Array, "batch heads"] | None:
    """The memory sizes of several mixers, [batch, heads], one after another; None if none has any."""
    present = [size for size in sizes if size is not None]
    return jnp.concatenate(present, axis=1) if present else None


def is_observed(config: ModelConfig) -> bool:
    """Whether a mixer of the model has a memory to monitor (`ObservedMixer`). The branch does not count."""
    return any(callable(getattr(resolve("mixer", name, MIXERS), "observe", None)) for name in config.mixers)


def check_divided(config: ModelConfig, parts: int, length: int | None = None, *, packed: bool = False) -> None:
    """Checks that the tokens of a sequence can be divided over devices (`mesh.sequence`) in all mixers of a model and its branch.

    A mixer says so by an attribute `undivided` that is None; if it is text, it is the reason why not. Mixers without it are
    refused: every device would run them on the whole sequence, whose memory and work the axis is to divide.

    Args:
      config: the model.
      parts: number of parts of a sequence.
      length: tokens of a sequence. None: any that the model can divide.
      packed: whether sequences are packed documents.

    Raises:
      ValueError: a mixer cannot be divided, or not such sequences. The message names it and the reason.
    """
    if parts == 1:
        return
    if config.inner_loop is not None:
        raise ValueError(
            f"mesh.sequence is {parts}, but model.inner_loop takes a step after every chunk of a sequence, so that its tokens "
            "cannot be divided over devices. Give mesh.sequence 1 and a larger mesh.data, fsdp or tensor."
        )
    if (branch := config.branch_alone) is not None:
        check_divided(branch, parts)
    for name in config.mixers:
        mixer = nnx.eval_shape(lambda name=name: make_mixer(name, config, rngs=nnx.Rngs(0)))
        reason = getattr(mixer, "undivided", NOT_DIVIDED)
        truncation = getattr(mixer, "truncation", None)
        if reason is None and truncation is not None:
            raise ValueError(
                f"mesh.sequence is {parts}, but memory.truncation of mixer {name!r} is {truncation}; give None, because gradients "
                "flow through the whole sequence."
            )
        if reason is None:
            continue
        rule = f" with rule {config.memory.rule!r}" if _takes_memory(mixer) else ""
        raise ValueError(
            f"mesh.sequence is {parts}, but the tokens of mixer {name!r}{rule} cannot be divided over devices: {reason}. Give "
            "mesh.sequence 1 and a larger mesh.data, fsdp or tensor; or a mixer whose state passes linearly (gated_deltanet, gla, "
            "rwkv7, mamba2, retnet, …), attention, or Memory Caching."
        )
    for call in memory_calls(config):
        one = (call.rule.part_multiple or 1) * parts
        check_divided_rule(call.rule, "mesh.sequence", one if length is None else length, parts, packed=packed)


def _takes_memory(mixer: Mixer) -> bool:
    """Whether `ModelConfig.memory` describes a memory of a mixer (class attribute `takes_memory` of the mixer or of a part)."""
    return any(getattr(module, "takes_memory", False) for _, module in nnx.iter_modules(cast(nnx.Module, mixer)))


def memory_calls(config: ModelConfig) -> list[MemoryCall]:
    """The different calls of `memory.scan` for whole sequences in a model, in the order of layers; last, those of its branch."""
    calls: list[MemoryCall | None] = []
    for name in config.mixers:
        mixer = nnx.eval_shape(lambda name=name: make_mixer(name, config, rngs=nnx.Rngs(0)))
        calls += [getattr(module, "memory_call", None) for _, module in nnx.iter_modules(cast(nnx.Module, mixer))]
    calls += [] if (branch := config.branch_alone) is None else memory_calls(branch)
    return list(dict.fromkeys(call for call in calls if call is not None))


def check_caching(config: ModelConfig) -> None:
    """Raises ValueError if the config has Memory Caching and none of its mixers takes it (class attribute `takes_caching`)."""
    takes = lambda name: getattr(resolve("mixer", name, MIXERS), "takes_caching", False)
    if config.caching is not None and not any(map(takes, config.mixers)):
        able = ", ".join(name for name in MIXERS if takes(name))
        raise ValueError(
            f"ModelConfig: caching is given, but mixer is {config.mixer!r}. Memory Caching is for recurrences whose state is a "
            f"matrix: {able}. Mixers with a memory have memory.caching."
        )


def _named(full_name: str) -> type:
    module, _, name = full_name.partition(":")
    return getattr(importlib.import_module(module), name)


MIXERS: dict[str, type] = {name: _named(full_name) for name, full_name in MIXER_NAMES.items()}


def make_mixer(name: str, config: ModelConfig, *, rngs: nnx.Rngs) -> Mixer:
    """Creates a mixer from a name in `MIXERS`, from several joined by "+", or from "package.module:Class".

    Raises:
      ValueError: the mixer is unknown, is not a `Mixer`, or rejects the config or options.
    """
    if "+" in name:
        return ParallelMixers(name.split("+"), config, rngs=rngs)
    made = resolve("mixer", name, MIXERS)
    options = config.mixer_options if ":" in name else "{}"
    mixer = call_with("mixer", name, made, config, rngs=rngs, options=options)
    missing = [method for method in ("__call__", "init_state", "extend") if not callable(getattr(mixer, method, None))]
    if missing or not isinstance(mixer, nnx.Module):
        what = f"has no {', '.join(missing)}" if missing else "is not a flax.nnx.Module"
        raise ValueError(f"mixer {name!r}: {type(mixer).__name__} {what}; see atlasjax.nn.Mixer.")
    return cast(Mixer, mixer)


class ParallelMixers(ObservedModule):
    """Mixers that read the same input and whose outputs are added, as Mamba-2 and attention in Falcon-H1: the name of such a layer
    is theirs, joined by "+".

    Args:
      names: two or more different names in `MIXERS`.
      config: the model's config, which all take.
      rngs: source of the initial values.

    Raises:
      ValueError: a name is unknown or there twice, or is of a mixer of your own; or a mixer rejects the config.
    """

    def __init__(self, names: Sequence[str], config: ModelConfig, *, rngs: nnx.Rngs):
        whole = "+".join(names)
        if len({*names}) < len(names) or any(":" in name for name in names):
            raise ValueError(f"mixer {whole!r}: what runs in parallel must be different mixers of the library.")
        self.size = len(names)
        for i, name in enumerate(names):
            setattr(self, f"mixer_{i}", make_mixer(name, config, rngs=rngs))

    def observe(
        self,
        x: Float[Array, "batch time dim"],
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
    ) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch heads"] | None]:
        """See `ObservedMixer`. The sizes of the memories of all mixers, one after another."""
        found = [observe(mixer, x, segment_ids, max_segments) for mixer in self._mixers()]
        return _total(found), joined_sizes(size for _, size in found)

    def init_state(self, batch_size: int, max_length: int | None = None) -> tuple[PyTree, ...]:
        """The states of all mixers before the first token."""
        return tuple(mixer.init_state(batch_size, max_length) for mixer in self._mixers())

    def extend(self, x: Float[Array, "batch time dim"], state: PyTree) -> tuple[Float[Array, "batch time dim"], PyTree]:
        """The output for the next piece of a sequence, and the next states."""
        found = [mixer.extend(x, one) for mixer, one in zip(self._mixers(), state, strict=True)]
        return _total(found), tuple(one for _, one in found)

    def extend_layer(
        self, x: Float[Array, "batch time dim"], states: PyTree, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "batch time dim"], PyTree]:
        """`extend` in the states of all layers. See `LayerwiseMixer`."""
        found = [extend_layer(mixer, x, one, layer) for mixer, one in zip(self._mixers(), states, strict=True)]
        return _total(found), tuple(one for _, one in found)

    @property
    def undivided(self) -> str | None:
        """See `check_divided`: the first mixer's reason."""
        reasons = (getattr(mixer, "undivided", NOT_DIVIDED) for mixer in self._mixers())
        return next((reason for reason in reasons if reason is not None), None)

    def _mixers(self) -> list[Mixer]:
        return [getattr(self, f"mixer_{i}") for i in range(self.size)]


def _total(found: Sequence[tuple[jax.Array, Any]]) -> jax.Array:
    """The sum of the first ones of the pairs."""
    return functools.reduce(operator.add, (y for y, _ in found))
