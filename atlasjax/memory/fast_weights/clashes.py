"""The choices of a `MemoryRule` that cannot be combined."""

from collections.abc import Iterator
from typing import Protocol

from atlasjax.check import is_integer
from atlasjax.memory.axes.optimizers import Optimizer
from atlasjax.memory.part_checks import PartsWithFeatures
from pallas_kernels.newton_schulz import SCHEDULES


class Choices(PartsWithFeatures, Protocol):
    """The choices of a `MemoryRule`, whose making calls this module."""

    @property
    def window(self) -> int: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def uses_muon(self) -> bool: ...


def _clashes_of_muon(kind: Optimizer) -> Iterator[tuple[str, str]]:
    """The fields of an optimizer that orthogonalizes, which may be a user's own."""
    optimizer = f"optimizer={kind!r}"
    steps, schedule = (getattr(kind, name, None) for name in ("steps", "schedule"))
    if not is_integer(steps, 0):
        yield optimizer, f"its steps={steps!r}, which must be an integer ≥ 0 as it orthogonalizes."
    if schedule not in SCHEDULES:
        known = " or ".join(map(repr, SCHEDULES))
        yield optimizer, f"its schedule={schedule!r}, which must be {known} as it orthogonalizes."
    if not kind.has_momentum:
        yield optimizer, "its has_momentum=False, which must be True as it orthogonalizes its momentum."


def _clashes_of_write_gate(kind: Optimizer) -> Iterator[tuple[str, str]]:
    """A write gate of an optimizer whose steps the step size scales already."""
    if kind.orthogonalizes:
        yield f"optimizer={kind!r}", "its write_gate=True: its step_size already says how much of NS(S) a token writes."
    elif kind.is_implicit or (kind.is_linear and not kind.has_momentum):
        yield (
            f"optimizer={kind!r}",
            "its write_gate=True: without momentum its step_size already says how much a token writes.",
        )


def _clashes_of_retention(rule: Choices, retention: str, optimizer: str, structure: str) -> Iterator[tuple[str, str]]:
    if rule.retention.gate not in (None, "scalar", "channel"):
        yield retention, f"its gate={rule.retention.gate!r}, which must be None, 'scalar' or 'channel'."
    if rule.retention.gate == "channel" and not rule.structure.is_matrix:
        yield retention, f"{structure}: a decay per feature channel is defined for Matrix() only. Use Scalar()."
    if rule.retention.decay_first and rule.retention.gate is None:
        yield retention, "its gate=None: without a gate there is no decay that could come first. Use decay_first=False."
    if rule.retention.decay_first and rule.chunk_size > 1:
        yield (
            retention,
            f"chunk_size={rule.chunk_size}: gradients are taken at the memory of the chunk's start, which is "
            "not decayed token by token. Use chunk_size=1.",
        )
    if rule.retention.follows_keys and (rule.retention.gate == "channel" or rule.retention.has_map):
        yield retention, "its follows_keys=True: it is defined for a scalar α and without a map."
    if rule.retention.follows_keys and rule.optimizer.per_channel:
        yield retention, f"{optimizer}: it forgets along a key by one step size, not by one per channel."


def _clashes_of_implicit(rule: Choices, optimizer: str, retention: str, online: bool) -> Iterator[tuple[str, str]]:
    """The choices for which the minimizer of an implicit step is not known."""
    if not (rule.structure.is_matrix and rule.objective.gradient_is_error and online):
        yield (
            optimizer,
            "the other choices: the step's minimizer is known for Matrix(), L2() and window=chunk_size=1 only.",
        )
    if not rule.retention.is_linear or rule.retention.has_map:
        yield optimizer, f"{retention}: the step's minimizer is known for a decay α M only."
    elif not (rule.retention.gate is None or rule.retention.decay_first):
        yield (
            optimizer,
            f"{retention}: it decays first. Use Full(), Scalar(decay_first=True) or Channel(decay_first=True).",
        )


def clashes(rule: Choices) -> Iterator[tuple[str, str]]:
    """Incompatible pairs of choices: (one, "the other: why and what to do")."""
    retention, optimizer, structure = (f"{n}={getattr(rule, n)!r}" for n in ("retention", "optimizer", "structure"))
    matrix = rule.structure.is_matrix
    online = rule.window == rule.chunk_size == 1
    yield from _clashes_of_retention(rule, retention, optimizer, structure)
    if rule.uses_muon:
        yield from _clashes_of_muon(rule.optimizer)
    if rule.optimizer.write_gate:
        yield from _clashes_of_write_gate(rule.optimizer)
    if rule.retention.has_map and rule.uses_muon:
        yield (
            retention,
            f"{optimizer}: an orthogonalized step cannot be combined with a retention map. Use GradientDescent().",
        )
    if not is_integer(rule.optimizer.every, 1):
        yield optimizer, f"its every={rule.optimizer.every!r}, which must be an integer ≥ 1."
    if rule.chunk_size % rule.optimizer.every:
        yield optimizer, f"chunk_size={rule.chunk_size}: `every` must divide the chunk size."
    if rule.optimizer.per_channel and not matrix:
        yield optimizer, f"{structure}: a step size per channel of the value is defined for Matrix() only."
    if rule.optimizer.per_channel and rule.window > 1:
        yield optimizer, f"window={rule.window}: a step size per channel is defined for window=1 only."
    if rule.optimizer.is_implicit:
        yield from _clashes_of_implicit(rule, optimizer, retention, online)
    if rule.objective.own_keys:
        objective = f"objective={rule.objective!r}"
        if not rule.objective.writes_at_own_keys:
            yield objective, "its own_keys: the write is known for objectives with writes_at_own_keys = True only."
        plain = rule.optimizer.is_linear and not rule.optimizer.has_momentum and not rule.optimizer.per_channel
        decays = rule.retention.is_linear and not rule.retention.has_map
        if not (matrix and online and plain and rule.features.is_identity and decays):
            yield (
                objective,
                "the other choices: it is defined for Matrix(), Identity(), GradientDescent(), a retention without a map, and "
                "window=chunk_size=1 only.",
            )
