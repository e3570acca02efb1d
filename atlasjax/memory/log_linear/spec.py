"""`LogLinearRule`: a memory rule that keeps one memory for each level of a Fenwick tree over the earlier segments."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int, PyTree

from atlasjax import check
from atlasjax.memory import check as checks
from atlasjax.memory.gates import Gates
from atlasjax.memory.log_linear.state import LogLinearState
from atlasjax.memory.rule import Params, Rule
from atlasjax.memory.wrapped import WrappedRule, check_lengths


@dataclasses.dataclass(frozen=True)
class LogLinearSpec(WrappedRule[Params, LogLinearState]):
    """The choices of a `LogLinearRule`, and what follows from them. `rule` runs it."""

    has_connector: ClassVar[bool] = True
    segments_continue: ClassVar[bool] = False

    rule: Rule[Params, PyTree]
    segment_size: int = 256
    levels: int = 15

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule) or not self.rule.can_be_cached:
            raise ValueError(
                f"LogLinearRule: rule must be a MemoryRule, got {type(self.rule).__name__}. (Or a memory.Rule of your own with "
                "cached_weights and read_cached.)"
            )
        check_lengths(self.rule, "LogLinearRule")
        if 'start="carry"' in self.rule.caching_limits:
            raise ValueError(
                f"LogLinearRule: rule is a {type(self.rule).__name__}, must be one whose state does not grow with the text: "
                "levels continue from one segment to the next."
            )
        for name in ("segment_size", "levels"):
            check.integer("LogLinearRule", name, getattr(self, name))
        if self.levels > 30:
            raise ValueError(f"LogLinearRule: levels={self.levels} must be at most 30.")
        if not self.rule.has_constant_gradient and self.segment_size % self.rule.chunk_size:
            raise ValueError(
                f"LogLinearRule: segment_size={self.segment_size} must be a multiple of the rule's "
                f"chunk_size={self.rule.chunk_size}."
            )

    def connector_channels(self, key_dim: int) -> int | None:
        return 1 + self.levels

    def count_levels(self, tokens: int) -> int:
        """Levels that some token of a text of this length reads."""
        return min(self.levels, ((tokens - 1) // self.segment_size).bit_length())

    @property
    def soup_limit(self) -> str | None:
        return "it keeps several memories, which every token weighs by itself"

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The rule's gates, and `connector`, of which the softplus is λ."""
        return self.rule.gate_channels(key_dim, value_dim) | {"connector": 1 + self.levels}

    def weight_norm(self, state: LogLinearState) -> Float[Array, "batch heads"] | None:
        """The norm of the memory of the current segment."""
        return self.rule.weight_norm(state.own)

    def max_length(self, state: object) -> int | None:
        levels = getattr(state, "levels", None)
        count = len(levels) if isinstance(levels, tuple) else 0
        return (self.segment_size << count >> 1) + 1 if count else 1

    def room(self, state: LogLinearState) -> Int[Array, " batch"] | None:
        levels = len(state.levels)
        return None if levels >= self.levels else (self.segment_size << levels) - state.position

    def check_read_gates(self, q: Float[Array, "*tokens heads key_dim"], gates: Gates, where: str) -> None:
        shape = (*q.shape[:-1], 1 + self.levels)
        if gates.connector is None:
            raise ValueError(f"{where}: gates.connector is missing; this rule needs it with shape {list(shape)}.")
        name = "gates.connector"
        checks.check_floating(name, checks.check_shape(name, gates.connector, shape, where), where)
