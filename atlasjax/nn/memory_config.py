"""The configuration of a memory: a rule by name, with overrides."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from atlasjax import check, rules
from atlasjax.memory import BACKENDS, CachedRule, MemoryRule, SoftmaxRule, structures
from atlasjax.memory import features as features_lib
from atlasjax.names import call_with, lookup, name_of, options_text, resolve
from atlasjax.nn.caching import CachingConfig

STRUCTURES: dict[str, type] = {
    "matrix": structures.Matrix,
    "mlp": structures.MLP,
    "gated_mlp": structures.GatedMLP,
}
FEATURES: dict[str, type] = {
    "identity": features_lib.Identity,
    "polynomial": features_lib.Polynomial,
    "elementwise": features_lib.Powers,
    "sketch": features_lib.TensorSketch,
}

# Fields of MemoryConfig that change the rule's structure or feature map instead of being arguments of the rule itself:
# our name → the name in the structure's or the map's own dataclass.
_STRUCTURE_FIELDS = {"depth": "depth", "expansion": "expansion"}
_FEATURE_FIELDS = {"degree": "degree", "sketch_size": "size"}
_RULE_FIELDS = {
    "chunk_size": "chunk_size",
    "window": "window",
    "cache_window": "cache_window",
    "newton_schulz_steps": "newton_schulz_steps",
    "newton_schulz_every": "newton_schulz_every",
    "newton_schulz_schedule": "schedule",
}


def _takes(rule: str, field: str, value: object, known: Iterable[str]) -> str:
    names = ", ".join(known) or "no overrides"
    return f"MemoryConfig: rule {rule!r} does not take {field}={value!r}. It takes: {names}."


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """A rule of `atlasjax.rules` by name, with overrides. None leaves a choice as the rule has it.

    Attributes:
      rule: a name of `rules.REGISTRY`, or "package.module:function" for a rule of your own: a function that returns a `MemoryRule`
        or a `SoftmaxRule`. The function itself is taken too, and kept as that name.
      rule_options: keyword arguments of that function beside the fields below, a JSON object; a dictionary is taken too, and kept
        as text.
      chunk_size: b ≥ 1 tokens whose gradients are taken at one memory. Part of the model.
      window: c ≥ 1 last tokens whose loss every step descends on (the Omega rule).
      cache_window: w ≥ window last tokens that a softmax memory's cache holds (swdt, dot).
      structure: "matrix", "mlp" or "gated_mlp".
      depth: number of matrices of an MLP memory, ≥ 1.
      expansion: hidden width of a deep memory over the head dimension, ≥ 1.
      features: feature map of queries and keys: "identity", "polynomial" (all monomials), "elementwise" (powers of each
        coordinate) or "sketch" (a TensorSketch of the polynomial).
      degree: its degree ≥ 1.
      sketch_size: numbers for each degree above one of a "sketch", ≥ 1.
      newton_schulz_steps: Newton–Schulz steps of a Muon rule, ≥ 0.
      newton_schulz_every: write the memory once in so many tokens (Muon rules); must divide the chunk size.
      newton_schulz_schedule: a name of `pallas_kernels.newton_schulz.SCHEDULES`.
      max_step: upper end of the step-size gate, > 0; None takes the one derived in `atlasjax.nn.gates`.
      bounded: keep the memory from diverging (`memory.Bound`); False: the recurrence of the papers. Without effect on kernel
        memories, whose reads are averages.
      caching: how the memories of earlier segments are cached and read; None: they are not.
      implementation: of `memory.scan` over whole sequences, as in training: "xla", "pallas_tpu", "pallas_gpu", or None: what is
        recorded as fastest. A stream is always extended by "xla".

    Raises:
      ValueError: an unknown name, an override that the rule does not take, or choices that clash.
    """

    rule: str = "atlas"
    rule_options: str = "{}"
    chunk_size: int | None = None
    window: int | None = None
    cache_window: int | None = None
    structure: str | None = None
    depth: int | None = None
    expansion: int | None = None
    features: str | None = None
    degree: int | None = None
    sketch_size: int | None = None
    newton_schulz_steps: int | None = None
    newton_schulz_every: int | None = None
    newton_schulz_schedule: str | None = None
    max_step: float | None = None
    bounded: bool = True
    caching: CachingConfig | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", name_of("MemoryConfig: rule", self.rule))
        object.__setattr__(self, "rule_options", options_text("MemoryConfig", "rule_options", self.rule_options))
        check.instance("MemoryConfig", "caching", self.caching, CachingConfig, optional=True)
        check.boolean("MemoryConfig", "bounded", self.bounded)
        check.number("MemoryConfig", "max_step", self.max_step, above=0, optional=True)
        if self.implementation is not None:
            resolve("MemoryConfig.implementation", self.implementation, BACKENDS)
        if not self.build().has_kernels and self.implementation not in (None, "xla"):
            raise ValueError(
                f'MemoryConfig: implementation="{self.implementation}" has no kernel for {self.build()!r}. Use "xla" or None.'
            )

    def build(self) -> rules.Rule | CachedRule:
        """The named rule with the overrides that are not None: a `MemoryRule` or `SoftmaxRule`; with caching a `CachedRule`.

        Raises:
          ValueError: as the class says; a refused override is named together with the rule and what the rule does take.
        """
        factory = resolve("memory rule", self.rule, rules.REGISTRY)
        parameters = inspect.signature(factory).parameters
        arguments: dict[str, Any] = {}
        for field, parameter in _RULE_FIELDS.items():
            value = getattr(self, field)
            if value is not None:
                if parameter not in parameters:
                    raise ValueError(_takes(self.rule, field, value, self.overrides()))
                arguments[parameter] = value
        if "expansion" in parameters and self.expansion is not None:
            arguments["expansion"] = self.expansion
        else:
            self._override_part("structure", STRUCTURES, _STRUCTURE_FIELDS, parameters, arguments)
        self._override_part("features", FEATURES, _FEATURE_FIELDS, parameters, arguments)
        rule = call_with("memory rule", self.rule, factory, options=self.rule_options, **arguments)
        if not isinstance(rule, MemoryRule | SoftmaxRule):
            raise ValueError(f"memory rule {self.rule!r} made {rule!r}, should be a MemoryRule or a SoftmaxRule.")
        if not self.bounded and isinstance(rule, MemoryRule):
            rule = rule.unbounded()
        return rule if self.caching is None else self.caching.around(rule)

    def _override_part(
        self,
        part: str,
        table: Mapping[str, type],
        fields: Mapping[str, str],
        parameters: Mapping[str, inspect.Parameter],
        arguments: dict[str, Any],
    ) -> None:
        """Put the structure or feature map into `arguments`, if it or one of its own fields is overridden."""
        given = {name: getattr(self, name) for name in (part, *fields) if getattr(self, name) is not None}
        if not given:
            return
        if part not in parameters:
            raise ValueError(_takes(self.rule, *next(iter(given.items())), self.overrides()))
        name = given.pop(part, None)
        value = parameters[part].default if name is None else lookup(part, name, table)()
        own = [field.name for field in dataclasses.fields(value)]
        for field in given:
            if fields[field] not in own:
                raise ValueError(
                    f"MemoryConfig: {field}={given[field]!r} clashes with {part}={name or _name_of(value, table)!r} "
                    f"of rule {self.rule!r}, which has no {field}."
                )
        arguments[part] = dataclasses.replace(value, **{fields[field]: x for field, x in given.items()})

    def overrides(self) -> tuple[str, ...]:
        """Names of the fields that this rule can override."""
        parameters = inspect.signature(resolve("memory rule", self.rule, rules.REGISTRY)).parameters
        names = [field for field, parameter in _RULE_FIELDS.items() if parameter in parameters]
        if "structure" in parameters:
            names += ["structure", *_STRUCTURE_FIELDS]
        elif "expansion" in parameters:
            names += ["expansion"]
        if "features" in parameters:
            names += ["features", *_FEATURE_FIELDS]
        return (*names, "max_step")


def _name_of(value: object, table: Mapping[str, type]) -> str:
    return next(name for name, kind in table.items() if type(value) is kind)
