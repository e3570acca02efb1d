"""Reports memories that grow while they are still finite, and says what helps."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
from flax import nnx

from atlasjax.nn import GateProjection, ModelConfig, abstract_model
from atlasjax.nn.mixers import is_observed

_AGAIN = 4.0  # a head is reported again when its norm has grown by this factor
_NAMED = 8  # heads named in one line; a model may have hundreds


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The norm of one head's memory in one step."""

    norm: float
    layer: int
    head: int
    step: int

    def __str__(self) -> str:
        return f"layer {self.layer}, head {self.head}"


class MemoryWatch:
    """Follows the memory norms of a run (`nn.LanguageModel.observe`), layer by layer and head by head.

    Args:
      model: the model. The advice depends on its memory.
      limit: a larger norm is reported, unless the memory only adds up what is written. A norm that is not finite is
        always reported.

    Attributes:
      suspected: whether a memory may be the cause of a value that is not finite.
    """

    def __init__(self, model: ModelConfig, limit: float):
        self._model = model
        self._limit = math.inf if all(only_adds(part) for part in _watched(model).values()) else limit
        self.suspected = False
        self._told: dict[tuple[int, int], float] = {}  # layer and head → the norm that was reported
        self._largest: _Seen | None = None  # of the finite ones
        self._broken: _Seen | None = None  # the first that was not

    def report(self, step: int, norms: Mapping[int, np.ndarray]) -> str | None:
        """Records the norms of a step.

        Args:
          step: number of optimizer steps done.
          norms: layer → [heads].

        Returns:
          One line for the user about the memories that passed the limit, or grew fourfold since they were last reported. None if
          there are none.
        """
        seen = [
            _Seen(float(norm), layer, head, step)
            for layer, heads in sorted(norms.items())
            for head, norm in enumerate(heads)
        ]
        broken = [one for one in seen if not math.isfinite(one.norm)]
        finite = [one for one in seen if math.isfinite(one.norm)]
        if broken and self._broken is None:
            self._broken = broken[0]  # of the lowest layer: those above it read what it gave
            self.suspected = bool(finite)  # were it the parameters, no memory would be finite
        self._largest = max(
            [*([self._largest] if self._largest else []), *finite], key=lambda one: one.norm, default=None
        )
        self.suspected |= any(one.norm > self._limit for one in finite)
        new = [one for one in broken if self._told.get((one.layer, one.head)) != math.inf]
        new += sorted((one for one in finite if one.norm > self._next(one)), key=lambda one: -one.norm)
        if not new:
            return None
        for one in new:
            self._told[one.layer, one.head] = one.norm if math.isfinite(one.norm) else math.inf
        named = "; ".join(f"{one}: {one.norm:.4g}" for one in new[:_NAMED])
        more = f"; and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        passed = f"whose norm passed {self._limit:g}, which may be diverging"
        what = "that are not finite" if new[-1] in broken else passed
        return f"step {step}: memories {what}: {named}{more}. What helps: {self.helps}."

    def summary(self) -> str:
        """One or two sentences about the largest norms so far, "" for a model without memories."""
        sentences = []
        if self._broken is not None:
            sentences.append(
                f"The first memory that was not finite is that of {self._broken}, in step {self._broken.step}."
            )
        if self._largest is not None:
            one = self._largest
            reported = f" (norms above {self._limit:g} are reported)" if self._limit < math.inf else ""
            sentences.append(
                f"The largest finite memory norm was {one.norm:.4g}, of {one}, in step {one.step}{reported}."
            )
        return " ".join(sentences)

    @functools.cached_property
    def helps(self) -> str:
        """Options that keep the memories small, for a user."""
        return " and ".join(dict.fromkeys(what_helps(part, option) for option, part in _watched(self._model).items()))

    def _next(self, one: _Seen) -> float:
        told = self._told.get((one.layer, one.head))
        return self._limit if told is None else _AGAIN * told


def only_adds(model: ModelConfig) -> bool:
    """Whether writes do not depend on the memory, as in linear attention. Its norm may be large, but cannot diverge."""
    return model.memory.build().has_constant_gradient


def _watched(model: ModelConfig) -> dict[str, ModelConfig]:
    """Prefix of its options → a model whose mixers have the memories that are followed: the model, and that of its branch."""
    if (branch := model.branch_alone) is None:
        return {"--model": model}
    parts = {"--model": dataclasses.replace(model, branch=None), "--model.branch": branch}
    return {option: part for option, part in parts.items() if is_observed(part)}


def what_helps(model: ModelConfig, option: str = "--model") -> str:
    """The options that keep the memories of such a model small, as a user gives them. They begin with `option`."""
    config = model.memory
    built = dataclasses.replace(config, bounded=True).build()
    rule = built.without_cache
    if not config.bounded and rule.is_bounded:
        return f"{option}.memory.bounded, which keeps memories from diverging"
    if "step_size" not in rule.gate_channels(model.resolved_head_dim, model.value_dim):
        return "a lower --optimizer.learning-rate"
    modules = (module for _, module in nnx.iter_graph(abstract_model(model)))
    now = max((module.max_step for module in modules if isinstance(module, GateProjection)), default=config.max_step)
    return f"a lower {option}.memory.max-step" + ("" if now is None else f" (it is {now:.3g})")
