"""Configuration of a memory: a rule by name, with overrides."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from atlasjax import check, rules
from atlasjax.memory import Rule, structures
from atlasjax.memory import features as features_lib
from atlasjax.memory.backends import backend_of
from atlasjax.memory.truncation import check_truncation
from atlasjax.names import call_with, lookup, name_of, options_text, resolve
from atlasjax.nn.caching_config import CachingConfig
from atlasjax.nn.hierarchy_config import HierarchyConfig

STRUCTURES: dict[str, type] = {
    "matrix": structures.Matrix,
    "mlp": structures.MLP,
    "gated_mlp": structures.GatedMLP,
    "plain_mlp": structures.PlainMLP,
    "swiglu": structures.SwiGLU,
}
FEATURES: dict[str, type] = {
    "identity": features_lib.Identity,
    "polynomial": features_lib.Polynomial,
    "elementwise": features_lib.Powers,
    "sketch": features_lib.TensorSketch,
}

# Fields of MemoryConfig that change the rule's structure or feature map and are not arguments of the rule itself:
# field → field of the structure's or feature map's dataclass.
_STRUCTURE_FIELDS = {"depth": "depth", "expansion": "expansion"}
_FEATURE_FIELDS = {"degree": "degree", "sketch_size": "size"}
_RULE_FIELDS = {
    "chunk_size": "chunk_size",
    "window": "window",
    "cache_window": "cache_window",
    "normalized": "normalized",
    "newton_schulz_steps": "newton_schulz_steps",
    "newton_schulz_every": "newton_schulz_every",
    "newton_schulz_schedule": "schedule",
}


def _takes(rule: str, field: str, value: object, known: Iterable[str]) -> str:
    names = ", ".join(known) or "no overrides"
    return f"MemoryConfig: rule {rule!r} does not take {field}={value!r}. It takes: {names}."


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """A rule of `atlasjax.rules` by name, with overrides. None keeps the rule's own value.

    Attributes:
      rule: a name in `rules.REGISTRY`. For a rule of your own: "package.module:function", where the function returns a
        `memory.Rule`; or the function itself, which is stored under that name.
      rule_options: further keyword arguments of that function, a JSON object as text. A dictionary is converted to text.
      chunk_size: b ≥ 1, tokens whose gradients are taken at the same memory. Part of the model.
      window: c ≥ 1, the number of most recent tokens whose losses each step minimizes (the Omega rule).
      cache_window: w ≥ window, the number of most recent tokens in the cache of a softmax memory (swdt, dot).
      structure: "matrix", "mlp", "gated_mlp", or without a residual "plain_mlp" or "swiglu".
      depth: number of matrices of an MLP memory, ≥ 1.
      expansion: ratio of the hidden width of a deep memory to the head dimension, ≥ 1.
      features: feature map of queries and keys: "identity", "polynomial" (all monomials), "elementwise" (powers of each
        coordinate) or "sketch" (a TensorSketch of the polynomial).
      degree: degree of the feature map, ≥ 1.
      sketch_size: features per degree above one in a "sketch", ≥ 1.
      normalized: whether a softmax memory divides by the sum of its weights, as softmax attention does.
      newton_schulz_steps: Newton–Schulz steps of a Muon rule, ≥ 0.
      newton_schulz_every: write the memory once every this many tokens (Muon rules). Must divide the chunk size.
      newton_schulz_schedule: a name in `pallas_kernels.newton_schulz.SCHEDULES`.
      max_step: upper limit of the step-size gate, > 0. None: the value derived in `atlasjax.memory.suggested`.
      bounded: whether to keep the memory from diverging (`memory.Bound`). False: the recurrence of the papers. No effect on
        rules that need no bound.
      truncation: tokens over which gradients flow back through the memory, a multiple of the chunk size (and of MAC's segments):
        truncated backpropagation through time in `memory.scan`, for whole sequences. None: exact gradients.
      caching: how memories of earlier segments are cached and read. None: no Memory Caching.
      hierarchy: one global memory with large chunks and local ones with small chunks, instead of one with chunk_size. None: one
        memory. Not with caching.
      implementation: backend of `memory.scan` for whole sequences, as in training: "xla", "pallas_tpu", "pallas_gpu", or None for
        the one recorded as fastest. It also decides for the baselines that are a memory rule with one matrix per head (DeltaNet,
        Gated DeltaNet, RetNet, Mamba-2, …). Streams always use "xla".

    Raises:
      ValueError: a name is unknown, the rule does not accept an override, or choices conflict.
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
    normalized: bool | None = None
    newton_schulz_steps: int | None = None
    newton_schulz_every: int | None = None
    newton_schulz_schedule: str | None = None
    max_step: float | None = None
    bounded: bool = True
    truncation: int | None = None
    caching: CachingConfig | None = None
    hierarchy: HierarchyConfig | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", name_of("MemoryConfig: rule", self.rule))
        object.__setattr__(self, "rule_options", options_text("MemoryConfig", "rule_options", self.rule_options))
        check.instance("MemoryConfig", "caching", self.caching, CachingConfig, optional=True)
        if self.caching is not None and self.caching.blended:
            raise ValueError(
                "MemoryConfig: caching has blended=True, which is for ModelConfig.caching: the gates of a memory have no λ that "
                "starts at 0."
            )
        check.instance("MemoryConfig", "hierarchy", self.hierarchy, HierarchyConfig, optional=True)
        for name in ("caching", "chunk_size"):
            if self.hierarchy is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"MemoryConfig: {name}={getattr(self, name)!r} is given with hierarchy, whose memories have chunks of their "
                    "own and no cache; must be None."
                )
        check.boolean("MemoryConfig", "bounded", self.bounded)
        check.number("MemoryConfig", "max_step", self.max_step, above=0, optional=True)
        if self.truncation is not None:
            check_truncation(self.build(), self.truncation, "MemoryConfig")
        if self.implementation is not None:
            backend_of(self.implementation, "MemoryConfig.implementation")
        if not self.build().has_kernels and self.implementation not in (None, "xla"):
            raise ValueError(
                f'MemoryConfig: implementation="{self.implementation}" has no kernel for {self.build()!r}. Use "xla" or None.'
            )

    @property
    def platform(self) -> str | None:
        """The only platform on which the implementation runs: "tpu", "cuda", …, or None."""
        return None if self.implementation is None else backend_of(self.implementation).platform

    def build(self) -> Rule:
        """The named rule with all overrides that are not None: a `memory.Rule`, with caching a `CachedRule` or a
        `LogLinearRule`, with hierarchy a `HierarchicalRule`.

        Raises:
          ValueError: as for the class. For a rejected override the message lists the overrides that the rule accepts.
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
        if not isinstance(rule, Rule):
            raise ValueError(f"memory rule {self.rule!r} returned {rule!r}, must be a memory.Rule.")
        if not self.bounded:
            rule = rule.unbounded()
        if self.hierarchy is not None:
            return self.hierarchy.around(rule)
        return rule if self.caching is None else self.caching.around(rule)

    def _override_part(
        self,
        part: str,
        table: Mapping[str, type],
        fields: Mapping[str, str],
        parameters: Mapping[str, inspect.Parameter],
        arguments: dict[str, object],
    ) -> None:
        """Adds the structure or feature map to `arguments` if it or one of its fields is overridden."""
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
        """Names of the fields that can override this rule's values."""
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
