"""`HierarchicalSpec`: a rule as one global memory with large chunks, and local memories with small ones, which restart."""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from atlasjax import check
from atlasjax.memory.family import FamilyRule
from atlasjax.memory.gates import Gates
from atlasjax.memory.hierarchical.state import HierarchicalParams, HierarchicalState
from atlasjax.memory.rule import Rule, Sizes
from atlasjax.memory.wrapped import check_lengths


@dataclasses.dataclass(frozen=True)
class HierarchicalSpec(FamilyRule[HierarchicalParams, HierarchicalState]):
    """The choices of a `HierarchicalRule`, and what follows from them. `rule` runs it."""

    rule: Rule[PyTree, PyTree]
    global_chunk: int = 2048
    local_chunks: tuple[int, ...] = (8,)
    restart: int = 2048
    projected: bool = True
    fine_chunks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        where = "HierarchicalRule"
        _check_inner(self.rule)
        for name in ("global_chunk", "restart"):
            check.integer(where, name, getattr(self, name))
        self._check_chunks("local_chunks")
        if self.fine_chunks is not None:
            self._check_chunks("fine_chunks")
            if len(self.fine_chunks) != len(self.local_chunks):
                raise ValueError(
                    f"{where}: fine_chunks is {self.fine_chunks}, should have {len(self.local_chunks)} numbers, one for each of "
                    f"local_chunks={self.local_chunks}."
                )
        check.boolean(where, "projected", self.projected)
        if self.global_chunk > 1 and self.global_rule.has_constant_gradient:
            raise ValueError(
                f"{where}: rule is {self.rule!r}, must be one in which the chunk size has an effect: its gradients do not depend "
                "on the memory."
            )

    def _check_chunks(self, name: str) -> None:
        """Makes a field with numbers of tokens a tuple, or raises ValueError."""
        where, given = "HierarchicalRule", getattr(self, name)
        if not isinstance(given, tuple | list) or not given:
            raise ValueError(f"{where}: {name} is {given!r}, must be numbers of tokens, such as (8,).")
        object.__setattr__(self, name, tuple(given))
        for chunk in given:
            check.integer(where, f"each of {name}", chunk)
            if chunk > self.global_chunk:
                raise ValueError(f"{where}: {name} has {chunk}, must be at most global_chunk={self.global_chunk}.")
            if self.restart % chunk:
                raise ValueError(
                    f"{where}: restart={self.restart} must be a multiple of each of {name}, which has {chunk}."
                )

    def with_chunk(self, chunk: int) -> Rule[PyTree, PyTree]:
        """The inner rule with chunks of this many tokens."""
        return dataclasses.replace(self.rule, chunk_size=chunk)  # type: ignore[type-var]

    @property
    def global_rule(self) -> Rule[PyTree, PyTree]:
        return self.with_chunk(self.global_chunk)

    @property
    def local_rules(self) -> tuple[Rule[PyTree, PyTree], ...]:
        return tuple(self.with_chunk(chunk) for chunk in self.fine_chunks or self.local_chunks)

    @property
    def members(self) -> tuple[Rule[PyTree, PyTree], ...]:
        """The rules of all memories, the global one first."""
        return (self.global_rule, *self.local_rules)

    @property
    def gate_sets(self) -> tuple[Rule[PyTree, PyTree], ...]:
        # Without the fine chunks, for which larger steps would be suggested: those of a trained model must not change.
        return (self.global_rule, *map(self.with_chunk, self.local_chunks))

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The inner rule's gates with one set for each memory, the global one first: a gate of C channels has (1 + n) · C here,
        and one without channels has 1 + n."""
        inner = self.rule.gate_channels(key_dim, value_dim)
        return {name: (1 + len(self.local_chunks)) * (channels or 1) for name, channels in inner.items()}

    def split_gates(self, gates: Gates, key_dim: int, value_dim: int) -> tuple[Gates, ...]:
        """The gates of each memory, the global one first, from those of the call, whose last axis is channels."""
        inner = self.rule.gate_channels(key_dim, value_dim)

        def of(i: int) -> Gates:
            given = {}
            for name, channels in inner.items():
                gate: jax.Array = getattr(gates, name)
                given[name] = gate[..., i] if channels is None else gate[..., i * channels : (i + 1) * channels]
            return Gates(**given)

        return tuple(of(i) for i in range(1 + len(self.local_chunks)))

    @property
    def chunk_size(self) -> int:
        """The smallest chunk: the unit of truncated gradients and of MAC's segments. Calls may begin and end anywhere."""
        return min(self.fine_chunks or self.local_chunks)

    @property
    def undivided(self) -> str | None:
        return "its global memory continues from one part of the sequence to the next"

    @property
    def soup_limit(self) -> str | None:
        return "it keeps several memories, which restart at places of their own"

    @property
    def has_residual(self) -> bool:
        return self.rule.has_residual

    @property
    def is_bounded(self) -> bool:
        return any(rule.is_bounded for rule in self.members)

    @property
    def has_fixed_steps(self) -> bool:
        return self.rule.has_fixed_steps

    def unbounded(self) -> Self:
        return dataclasses.replace(self, rule=self.rule.unbounded())

    def for_unit_keys(self, key_dim: int) -> Self:
        return dataclasses.replace(self, rule=self.rule.for_unit_keys(key_dim))

    def weight_norm(self, state: HierarchicalState) -> Float[Array, "batch heads"] | None:
        """The norm of the largest of the memories."""
        memories = (state.global_memory, *state.local_memories)
        norms = [rule.weight_norm(memory) for rule, memory in zip(self.members, memories, strict=True)]
        known = [norm for norm in norms if norm is not None]
        return functools.reduce(jnp.maximum, known) if known else None

    def sizes(self, params: HierarchicalParams) -> Sizes:
        return self.global_rule.sizes(params.global_memory)

    def for_heads(self, params: HierarchicalParams, heads: int) -> HierarchicalParams:
        return HierarchicalParams(
            self.global_rule.for_heads(params.global_memory, heads),
            tuple(
                rule.for_heads(own, heads) for rule, own in zip(self.local_rules, params.local_memories, strict=True)
            ),
        )


def _check_inner(rule: object) -> None:
    where = "HierarchicalRule"
    kind = type(rule).__name__
    if not isinstance(rule, Rule):
        raise TypeError(f"{where}: rule must be a memory.Rule, such as rules.titans(), got {kind}.")
    if not dataclasses.is_dataclass(rule) or "chunk_size" not in (field.name for field in dataclasses.fields(rule)):
        raise ValueError(
            f"{where}: rule is a {kind}, which has no chunks; must be a MemoryRule, or a dataclass with the field chunk_size."
        )
    if 'start="carry"' in rule.caching_limits or not rule.segments_continue:
        raise ValueError(
            f"{where}: rule is a {kind}, must be one whose state does not grow with the text: the global memory continues from "
            "one shard to the next."
        )
    check_lengths(rule, where)
