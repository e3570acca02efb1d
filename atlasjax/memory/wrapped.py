"""`WrappedRule`: a rule around another one, which writes with the inner rule and differs in what is kept and read."""

import abc
import dataclasses
import functools
import inspect
from typing import ClassVar, Self, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from atlasjax.memory.family import FamilyRule
from atlasjax.memory.gates import Gates
from atlasjax.memory.rule import Params, Rule, Sizes
from atlasjax.memory.tokens import Tokens

State = TypeVar("State")


def check_lengths(rule: Rule[Params, PyTree], where: str) -> None:
    """Raises ValueError unless the `scan` of a rule takes `lengths`, which the rule around it gives."""
    parameters = inspect.signature(rule.scan).parameters.values()
    if not any(p.name == "lengths" or p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise ValueError(
            f"{where}: {type(rule).__name__}.scan does not take lengths, and should: see memory.Rule.scan."
        )


class WrappedRule(FamilyRule[Params, State]):
    """A frozen dataclass with a field `rule`, which owns the parameters, gates and bounds.

    Attributes:
      rule: the inner rule, which writes.
      segment_size: tokens per segment.
    """

    read_gates: ClassVar[tuple[str, ...]] = ("connector",)  # those that only reads use, unknown to the inner rule

    rule: Rule[Params, PyTree]
    segment_size: int

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
        given = gates if isinstance(gates, Gates) else Gates()
        plain = given._replace(**dict.fromkeys(self.read_gates)) if given is gates else gates
        self.rule.check_call(params, None, q, k, v, plain, time=time, where=where)
        self.check_read_gates(q, given, where)
        if state is not None:
            self.check_state(params, state, q.shape[0], q.shape[-2], where)

    @abc.abstractmethod
    def check_read_gates(self, q: Float[Array, "*tokens heads key_dim"], gates: Gates, where: str) -> None:
        """Raises TypeError or ValueError if one of `read_gates` is missing, is not used, or is wrong."""

    def continue_segments(
        self, params: Params, state: PyTree, tokens: Tokens, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, PyTree]:
        """`rule.scan` from the inner rule's state after whole segments. Its chunks are aligned statically if they divide segments.

        lengths: as in `rule.scan`, [batch].
        """
        rule = self.rule
        scan = rule.scan if lengths is None else functools.partial(rule.scan, lengths=lengths)
        if not (rule.has_constant_gradient or self.segment_size % rule.chunk_size == 0):
            return scan(params, state, *tokens)
        y, after = scan(params, rule.known_chunk_start(state), *tokens)
        return y, rule.after_known_start(after, state, tokens.q.shape[1] if lengths is None else lengths)

    @property
    def without_cache(self) -> Rule[Params, PyTree]:
        return self.rule

    @property
    def has_residual(self) -> bool:
        return self.rule.has_residual

    @property
    def chunk_size(self) -> int:
        return self.rule.chunk_size

    @property
    def has_constant_gradient(self) -> bool:
        return self.rule.has_constant_gradient

    @property
    def is_bounded(self) -> bool:
        return self.rule.is_bounded

    @property
    def has_fixed_steps(self) -> bool:
        return self.rule.has_fixed_steps

    @property
    def forgets_fast(self) -> bool:
        return self.rule.forgets_fast

    def unbounded(self) -> Self:
        return dataclasses.replace(self, rule=self.rule.unbounded())  # type: ignore[type-var]

    def for_unit_keys(self, key_dim: int) -> Self:
        return dataclasses.replace(self, rule=self.rule.for_unit_keys(key_dim))  # type: ignore[type-var]

    def sizes(self, params: Params) -> Sizes:
        return self.rule.sizes(params)

    def init_params(self, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int) -> Params:
        return self.rule.init_params(key, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)

    def check_params(self, params: Params, where: str) -> None:
        self.rule.check_params(params, where)

    def for_heads(self, params: Params, heads: int) -> Params:
        return self.rule.for_heads(params, heads)

    def suggested_steps(
        self,
        key_dim: int,
        value_dim: int,
        forgetting: np.ndarray,
        momentum_decay: np.ndarray,
        window_weights: np.ndarray,
        similar_keys: bool,
    ) -> tuple[np.ndarray, float]:
        return self.rule.suggested_steps(key_dim, value_dim, forgetting, momentum_decay, window_weights, similar_keys)

    def start_scale(self, step_size: np.ndarray) -> np.ndarray:
        return self.rule.start_scale(step_size)
