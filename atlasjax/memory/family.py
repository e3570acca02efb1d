"""`FamilyRule`: a rule of one of the library's families, whose engines take the tokens of a call as one value."""

import abc
from typing import Any

from jaxtyping import Array, Float, Int

from atlasjax.memory.gates import Gates
from atlasjax.memory.layerwise import put_layer, take_layer
from atlasjax.memory.rule import Params, Rule, ScanCall, State
from atlasjax.memory.tokens import Tokens


class FamilyRule(Rule[Params, State]):
    """The methods of `Rule` that have tokens as arguments, once for all families. Each calls one of the methods below them, which a
    family defines for `Tokens`. A rule of your own inherits from `Rule`."""

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
        **options: Any,
    ) -> tuple[Float[Array, "batch time heads value_dim"], State]:
        """`Rule.scan`. options: those of one family, such as `soup` of a `MemoryRule`."""
        return self.scan_tokens(params, state, Tokens(q, k, v, gates, segment_ids), max_segments, lengths, **options)

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
        return self.scan_tokens_part(axes, run, params, state, Tokens(q, k, v, gates, segment_ids))

    def step(
        self,
        params: Params,
        state: State,
        q: Float[Array, "batch heads key_dim"],
        k: Float[Array, "batch heads key_dim"],
        v: Float[Array, "batch heads value_dim"],
        gates: Gates,
        **options: Any,
    ) -> tuple[Float[Array, "batch heads value_dim"], State]:
        """`Rule.step`. options: as in `scan`."""
        return self.step_token(params, state, Tokens(q, k, v, gates), **options)

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
        return self.step_token_in_layer(params, states, layer, Tokens(q, k, v, gates))

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
        return self.reference_tokens(params, state, Tokens(q, k, v, gates, segment_ids))

    @abc.abstractmethod
    def scan_tokens(
        self,
        params: Params,
        state: State | None,
        tokens: Tokens,
        max_segments: int | None,
        lengths: Int[Array, " batch"] | None,
    ) -> tuple[Float[Array, "batch time heads value_dim"], State]:
        """`scan`."""

    def scan_tokens_part(
        self, axes: tuple[str, ...], run: ScanCall[Params, State], params: Params, state: State | None, tokens: Tokens
    ) -> tuple[Float[Array, "batch time heads value_dim"], State]:
        """`scan_part`."""
        raise NotImplementedError

    @abc.abstractmethod
    def step_token(
        self, params: Params, state: State, tokens: Tokens
    ) -> tuple[Float[Array, "batch heads value_dim"], State]:
        """`step`."""

    def step_token_in_layer(
        self, params: Params, states: State, layer: Int[Array, ""], tokens: Tokens
    ) -> tuple[Float[Array, "batch heads value_dim"], State]:
        """`step_layer`. The default takes the state out and puts it back whole."""
        y, state = self.step_token(params, take_layer(states, layer), tokens)
        return y, put_layer(states, state, layer, y, f"{type(self).__name__}.step")

    @abc.abstractmethod
    def reference_tokens(
        self, params: Params, state: State | None, tokens: Tokens
    ) -> tuple[Float[Array, "batch time heads value_dim"], State]:
        """`reference`."""
