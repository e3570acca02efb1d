"""`Rule`: the interface that the functions of `atlasjax.memory` require of every rule."""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from atlasjax.memory import call_checks
from atlasjax.memory.gates import Gates, Weights
from atlasjax.memory.tokens import Tokens

Params = TypeVar("Params")  # a rule's learned parameters
State = TypeVar("State")  # its recurrent state
ScanCall = Callable[
    [
        Params,
        State | None,
        Float[Array, "batch time heads key_dim"],
        Float[Array, "batch time heads key_dim"],
        Float[Array, "batch time heads value_dim"],
        Gates,
        Int[Array, "batch time"] | None,
    ],
    tuple[Float[Array, "batch time heads value_dim"], State],
]
"""(params, state, q, k, v, gates, segment_ids) → (y, state): a `scan` whose rule and options are chosen."""
TokensCall = Callable[[Params, State | None, Tokens], tuple[Float[Array, "batch time heads value_dim"], State]]
"""The same, with the tokens as one value."""


class Sizes(NamedTuple):
    """Sizes of learned parameters. num_heads is None if they fit any number of heads."""

    num_heads: int | None
    key_dim: int
    value_dim: int


class Rule(abc.ABC, Generic[Params, State]):
    """A memory, and how it is written and read. Frozen and hashable, static under `jax.jit`.

    The library has `MemoryRule`, `SoftmaxRule`, `LargeChunkRule` and `MesaRule`, and around them `CachedRule`, `LogLinearRule` and
    `HierarchicalRule`. A rule of your own with another kind of memory inherits from this class and runs in `memory.scan`, `step`,
    `read` and `reference`, which check the arguments and call its methods. Arguments and results are those of the functions of the
    same names. Leaves of a state are [batch] or [batch, heads, …].

    A state class with the attribute `heads_axis = 1` is divided over the devices that divide the heads
    (`distributed.cache_shardings`).

    `Rule[MyParams, MyState]` names the types of the parameters and of the state for a type checker; both are pytrees.

    `CachedRule` and `LogLinearRule` accept a rule that has `cached_weights` and `read_cached`.
    """

    has_kernels: ClassVar[bool] = False  # whether backends other than "xla" and "reference" are considered
    has_connector: ClassVar[bool] = False  # whether `read` takes a connector
    # Whether `scan` takes segment_ids with a state, which the first segment continues.
    segments_continue: ClassVar[bool] = True
    # Choices of a `CachedRule` that this rule does not allow → the reason.
    caching_limits: ClassVar[Mapping[str, str]] = {
        'aggregation="soup"': 'is not supported for this rule: its reads cannot mix weights. Use "grm".'
    }

    @abc.abstractmethod
    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The gates of this rule: name → number of channels (an axis after heads), or None for one scalar per token and head."""

    @abc.abstractmethod
    def sizes(self, params: Params) -> Sizes:
        """The sizes for which `params` were initialized."""

    @abc.abstractmethod
    def init_params(self, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int) -> Params:
        """Initial learned parameters: a pytree in which the first axis of every leaf is heads."""

    @abc.abstractmethod
    def init_state(self, params: Params, *, batch_size: int, max_length: int | None = None) -> State:
        """A fresh memory for every batch element."""

    @abc.abstractmethod
    def scan(
        self,
        params: Params,
        state: State | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
        max_segments: int | None = None,
        *,
        lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], State]:
        """The recurrence over a sequence, compiled by XLA.

        lengths: [batch], number of tokens in each row; given only by a rule around this one. The other tokens are not written, and
          their outputs are not used.
        """

    @abc.abstractmethod
    def step(
        self,
        params: Params,
        state: State,
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
    ) -> tuple[Float[Array, "batch heads value_dim"], State]:
        """One token: arrays without the time axis."""

    def step_layer(
        self,
        params: Params,
        states: State,
        layer: Int[Array, ""],
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
    ) -> tuple[Float[Array, "batch heads value_dim"], State]:
        """`step` with the states of all layers, [layers, batch, …], of which `layer` is read and written where it lies. For a rule
        of which a token changes little of a large state; others go without it. A subclass with a `step` of its own does not
        inherit it."""
        raise NotImplementedError

    def connector_channels(self, key_dim: int) -> int | None:
        """Channels of `connector`; None if there is none."""
        return key_dim if self.has_connector else None

    @abc.abstractmethod
    def read(
        self, params: Params, state: State, q: Float[Array, "batch time heads key_dim"]
    ) -> Float[Array, "batch time heads value_dim"]:
        """Reads without writing. With `has_connector` there is a further argument `connector`."""

    @abc.abstractmethod
    def reference(
        self,
        params: Params,
        state: State | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], State]:
        """The definition, token by token."""

    @property
    def chunk_size(self) -> int:
        """Number of consecutive tokens whose gradients are taken at the same memory."""
        return 1

    @property
    def has_constant_gradient(self) -> bool:
        """Whether the chunk size has no effect."""
        return self.chunk_size == 1

    @property
    def undivided(self) -> str | None:
        """Why the tokens of a sequence cannot be divided over devices (`Partition.time`). None if they can, by `scan_part`."""
        return "the rule has no form for a part of the sequence"

    @property
    def part_multiple(self) -> int | None:
        """Each device's number of tokens must be a multiple of this where they are divided. None: the last ones may be padded."""
        return None

    @property
    def undivided_documents(self) -> str | None:
        """Why the tokens of packed documents cannot be divided over devices, if others can."""
        return None

    def scan_part(
        self,
        axes: tuple[str, ...],
        run: ScanCall[Params, State],
        params: Params,
        state: State | None,
        q: Float[Array, "batch time heads key_dim"],
        k: Float[Array, "batch time heads key_dim"],
        v: Float[Array, "batch time heads value_dim"],
        gates: Gates,
        segment_ids: Int[Array, "batch time"] | None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], State]:
        """The part of one device, inside a `shard_map` that divides the tokens over `axes`; see `sequence_parallel.scan_part`."""
        raise NotImplementedError

    def check_params(self, params: Params, where: str) -> None:
        """Raises TypeError or ValueError if `params` does not belong to this rule."""

    def for_heads(self, params: Params, heads: int) -> Params:
        """Parameters that fit any number of heads (`sizes`), for this number: inside a `shard_map` a call has some of the heads."""
        return params

    def max_length(self, state: object) -> int | None:
        """The `max_length` with which a state was created, None if it has no effect. `state` has not been checked."""
        return None

    def room(self, state: State) -> Int[Array, " batch"] | None:
        """How many more tokens of the current segment each row can read before its outputs are NaN. None: there is no limit."""
        return None

    def check_call(
        self,
        params: Params,
        state: State | None,
        q: Float[Array, "*tokens heads key_dim"],
        k: Float[Array, "*tokens heads key_dim"],
        v: Float[Array, "*tokens heads value_dim"],
        gates: Gates,
        *,
        time: bool,
        where: str,
    ) -> None:
        """Raises TypeError or ValueError for an invalid argument. None of them has been checked."""
        call_checks.check_call(self, params, state, Tokens(q, k, v, gates), time=time, where=where)

    def check_state(self, params: Params, state: State, batch: int, heads: int, where: str) -> None:
        """Raises TypeError or ValueError if a state does not belong to this rule, these parameters and these sizes."""
        call_checks.check_state(self, params, state, batch, heads, where)

    def for_unit_keys(self, key_dim: int) -> Self:
        """This rule as models use it, whose keys and queries have unit length."""
        return self

    @property
    def without_cache(self) -> "Rule[PyTree, PyTree]":
        """The rule that is written: that of a `WrappedRule`, otherwise this one."""
        return self

    @property
    def is_bounded(self) -> bool:
        """Whether the rule has bounds that act on its steps or weights, without which it is `unbounded()`."""
        return False

    def unbounded(self) -> Self:
        """The same rule without bounds."""
        return self

    def weight_norm(self, state: State) -> Float[Array, "batch heads"] | None:
        """The size of a memory, for monitoring: the largest ‖W‖_F / √rows over its weights, float32, without gradient. None, the
        default, if the memory has no weights of which the size says whether it diverges."""
        return None

    @property
    def reads_are_linear(self) -> bool:
        """Whether a read is linear in `cached_weights`, so that a read of a sum of weights is the sum of the reads."""
        return True

    @property
    def has_residual(self) -> bool:
        """Whether a read adds the query itself, so that values must be as wide as keys."""
        return False

    def read_part(self, state: State) -> State:
        """A state without what `read` does not use, for callers that keep a memory as it was. Its absent fields are None."""
        return state

    def with_read_part(self, part: State, state: State) -> State:
        """A state that reads like `part`, a result of `read_part`, with the other fields of `state`."""
        return part

    def known_chunk_start(self, state: State) -> State:
        """A state at the start of a chunk, in the form from which `scan` sees this before it runs. The default is the state itself,
        for rules that need not know it."""
        return state

    def after_known_start(self, after: State, state: State, time: int | Int[Array, " batch"]) -> State:
        """The state after `time` tokens, whole again, from `after`, with which a `scan` from `known_chunk_start(state)` ended."""
        return after

    @property
    def gate_sets(self) -> "tuple[Rule[PyTree, PyTree], ...]":
        """The rules of which each has a set of gates, beside each other in the channels: the memories of a `HierarchicalRule`,
        otherwise this rule."""
        return (self,)

    @property
    def has_fixed_steps(self) -> bool:
        """Whether the size of a write does not depend on the size of the gradient (Muon)."""
        return False

    @property
    def forgets_fast(self) -> bool:
        """Whether `suggested_gates` starts with short time scales of retention, because a write does not depend on earlier ones."""
        return False

    def suggested_steps(
        self,
        key_dim: int,
        value_dim: int,
        forgetting: np.ndarray,
        momentum_decay: np.ndarray,
        window_weights: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:
        """Initial step sizes for `suggested_gates`, and their upper bound.

        Args:
          key_dim, value_dim: sizes.
          forgetting, momentum_decay, window_weights: initial 1 − α and θ [heads], and γ [heads, c].
          similar_keys: whether the keys of a chunk are expected to be nearly equal.
        """
        if "step_size" in self.gate_channels(key_dim, value_dim):
            raise ValueError(
                f"memory.suggested_gates: {type(self).__name__} has no suggested_steps; choose step sizes yourself."
            )
        return np.ones_like(forgetting), 1.0

    def start_scale(self, step_size: np.ndarray) -> np.ndarray:
        """Initial scale of each head's weights relative to their fan-in scale. step_size: initial η, [heads]."""
        return np.ones_like(step_size)

    @property
    def soup_limit(self) -> str | None:
        """Why `memory.soup` has no meaning for this rule. None: it has one, and the rule has `soup`."""
        return "its state is not a set of weights that a weighted sum may replace"

    def soup(self, states: Sequence[State], weights: Float[Array, " states"]) -> State:
        """The state of which the memory is Σ_i w_i M^(i). The states have one shape."""
        raise NotImplementedError

    @property
    def can_be_cached(self) -> bool:
        """Whether `CachedRule` accepts this rule."""
        return type(self).cached_weights is not Rule.cached_weights

    def cached_weights(self, state: State) -> Weights:
        """The part of a segment's last state that a `CachedRule` keeps for reads: name → [batch, heads, …]."""
        raise NotImplementedError

    def read_cached(
        self, dtype: jnp.dtype, params: Params, weights: Weights, q: Float[Array, "time key_dim"]
    ) -> Float[Array, "time value_dim"]:
        """The read of one cached memory of one head, without the residual.

        params, weights: of one head. dtype: dtype of the inputs of products.
        """
        raise NotImplementedError

    def reference_read(
        self, params: Params, weights: Weights, x: Float[Array, " key_dim"]
    ) -> Float[Array, " value_dim"]:
        """The definition of a read of one cached memory of one head with its residual."""
        y = self.read_cached(x.dtype, params, weights, x[None])[0]
        skip = self.residual(params, x[None])
        return y if skip is None else y + skip[0]

    def residual(self, params: Params, q: Float[Array, "... key_dim"]) -> Float[Array, "... value_dim"] | None:
        """The part of a read of one head that is independent of the memory, or None."""
        return None


def check_rule(rule: object, where: str) -> None:
    """Raises TypeError if `rule` is not a `Rule`."""
    if not isinstance(rule, Rule):
        hint = f" Give an instance, {rule.__name__}(...), not the class." if isinstance(rule, type) else ""
        raise TypeError(
            f"{where}: rule must be a MemoryRule, a SoftmaxRule, a LargeChunkRule, a CachedRule, a LogLinearRule or another "
            f"memory.Rule, got {type(rule).__name__}.{hint}"
        )
