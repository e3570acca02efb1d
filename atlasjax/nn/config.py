"""What a model is made of: frozen, flat, JSON-able dataclasses, checked where they are made."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from atlasjax import rules
from atlasjax.memory import features as features_lib
from atlasjax.memory import structures
from atlasjax.memory.rule import MemoryRule
from atlasjax.names import lookup

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
    "newton_schulz_steps": "newton_schulz_steps",
    "newton_schulz_every": "newton_schulz_every",
    "newton_schulz_schedule": "schedule",
}


def _takes(rule: str, field: str, value: object, known: typing.Iterable[str]) -> str:
    names = ", ".join(known) or "no overrides"
    return f"MemoryConfig: rule {rule!r} does not take {field}={value!r}. It takes: {names}."


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """A rule of `atlasjax.rules` by name, with overrides. None leaves a choice as the rule has it.

    Attributes:
      rule: a name of `rules.REGISTRY`.
      chunk_size: b ≥ 1 tokens whose gradients are taken at one memory. Part of the model.
      window: c ≥ 1 last tokens whose loss every step descends on (the Omega rule).
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

    Raises:
      ValueError: an unknown name, an override that the rule does not take, or choices that clash.
    """

    rule: str = "atlas"
    chunk_size: int | None = None
    window: int | None = None
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

    def __post_init__(self) -> None:
        if self.max_step is not None and not (_is_number(self.max_step) and self.max_step > 0):
            raise ValueError(f"MemoryConfig: max_step must be a number > 0, got {self.max_step!r}.")
        self.build()

    def build(self) -> MemoryRule:
        """The `MemoryRule`: the named rule with the overrides that are not None.

        Raises:
          ValueError: as the class says; a refused override is named together with the rule and what the rule does take.
        """
        factory = lookup("memory rule", self.rule, rules.REGISTRY)
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
        return factory(**arguments)

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
        parameters = inspect.signature(lookup("memory rule", self.rule, rules.REGISTRY)).parameters
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model: embedding, pre-norm layers of (mixer, SwiGLU), norm, head.

    Attributes:
      vocab_size: number of tokens of the vocabulary.
      dim: width of the residual stream.
      num_layers: number of layers.
      num_heads: heads of each mixer.
      head_dim: size of a head's queries, keys and values; None: dim / num_heads.
      mixer: a name of `atlasjax.nn.mixers.MIXERS`.
      memory: the memory of the "memory" mixer.
      conv_width: taps of the causal convolution on q, k and v; 1 is a gain for each channel.
      mlp_dim: hidden width of SwiGLU; None: 8/3 dim, rounded up to a multiple of 128.
      tie_embeddings: whether the head is the transposed embedding.
      norm_eps: added to the mean square in every RMSNorm.
      dtype: of activations and matmul inputs, "bfloat16" or "float32". Parameters, gates, memories, norms' statistics and
        logits are always float32.
      remat: recompute each layer in the backward pass instead of keeping its activations.

    Raises:
      ValueError: a field out of its range, or a clash; the message names it, what it was and what it should be.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    head_dim: int | None = None
    mixer: str = "memory"
    memory: MemoryConfig = MemoryConfig()
    conv_width: int = 4
    mlp_dim: int | None = None
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "conv_width", "head_dim", "mlp_dim"):
            value = getattr(self, name)
            if value is None and name in ("head_dim", "mlp_dim"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"ModelConfig: {name} must be an integer ≥ 1, got {value!r}.")
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"ModelConfig: num_heads={self.num_heads} does not divide dim={self.dim}. "
                "Change one of them, or give head_dim."
            )
        if not _is_number(self.norm_eps) or self.norm_eps <= 0:
            raise ValueError(f"ModelConfig: norm_eps must be a number > 0, got {self.norm_eps!r}.")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"ModelConfig: dtype must be 'bfloat16' or 'float32', got {self.dtype!r}.")
        for name in ("tie_embeddings", "remat"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"ModelConfig: {name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.memory, MemoryConfig):
            raise ValueError(f"ModelConfig: memory must be a MemoryConfig, got {self.memory!r}.")

    @property
    def resolved_head_dim(self) -> int:
        """Size of a head's queries, keys and values."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def resolved_mlp_dim(self) -> int:
        """Hidden width of SwiGLU."""
        return -(-8 * self.dim // (3 * 128)) * 128 if self.mlp_dim is None else self.mlp_dim


def config_to_dict(config: Any) -> dict[str, Any]:
    """A frozen config dataclass, nested ones included, as a dictionary of JSON values."""
    return dataclasses.asdict(config)


C = TypeVar("C")


def config_from_dict(values: Mapping[str, Any], cls: type[C] = ModelConfig) -> C:  # type: ignore[assignment]
    """The inverse of `config_to_dict`.

    Args:
      values: field name → JSON value; fields that are missing keep their defaults.
      cls: the dataclass to build.

    Raises:
      ValueError: an unknown field (with the nearest known one), a value of a wrong type, or one that the dataclass refuses.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{cls.__name__}: expected a dictionary of fields, got {values!r}.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        kind = lookup(f"field of {cls.__name__}", name, fields)
        arguments[name] = _convert(f"{cls.__name__}.{name}", kind, value)
    return cls(**arguments)


def _convert(where: str, kind: Any, value: Any) -> Any:
    """`value` as a field of type `kind`: nested dataclasses, scalars, X | None, and Literal."""
    if dataclasses.is_dataclass(kind):
        return config_from_dict(value, kind)  # type: ignore[arg-type]
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise ValueError(f"{where}: must be one of {', '.join(map(repr, typing.get_args(kind)))}, got {value!r}.")
        return value
    options = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not any(type(value) is option for option in options):
        names = " or ".join("None" if o is type(None) else o.__name__ for o in options)
        raise ValueError(f"{where}: must be {names}, got {value!r}.")
    return value
