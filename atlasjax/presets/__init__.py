"""Named model configurations: every architecture at the sizes of A Table 7, and tiny ones for a CPU.

A preset is named `<architecture>-<size>`. `ARCHITECTURES` has the fields that an architecture changes, one line each, and `SIZES`
has the sizes. A published model has its own name (`retnet`, `gated-deltanet-h2`). In addition, every rule of `atlasjax.rules` is
available as the only mixer of each layer, `<rule>-lmm` (and `<rule>`, if no published model has that name), and in the backbones
that combine it with attention.

A Table 7 gives the number of layers, the width and the number of heads, but neither the width of SwiGLU nor whether the head is
tied, and mixers differ in their number of parameters. Here the head is tied at 340M and 760M, and untied at 170M and 1.3B. The
width of SwiGLU (or the number of layers in models without a feed-forward network) is chosen so that the number of parameters is as
close as possible to the name of the size. So all architectures of one size have the same number of parameters
(`nn.count_parameters`), up to one step of that width. The vocabulary is the paper's, 32,000.

The papers do not specify the following, so it is chosen here: attention windows of 2,048 tokens and MAC segments of 512 (64 and 64
in tiny models), 16 persistent tokens (4), and 4,096 learned positions (512) in models that have them.

Here the rules of the Omega family (omeganet, atlas, atlas_plus_plus) use elementwise powers of degree 2, D = 2 · head_dim. The
default of `rules.atlas`, all monomials, has D = C(head_dim + 2, 2), which is 2,145 for heads of 64. This would give a memory of 565
thousand numbers per head, 217 million parameters for the 24 layers of 16 heads of atlas-340m alone, and a state of three times as
many float32 numbers per sequence. `MemoryConfig(features="polynomial")` selects it.
"""

import dataclasses
import functools
import inspect
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from atlasjax import json_text, nn, rules
from atlasjax.names import lookup, name_of, resolve, takes
from atlasjax.nn.caching_config import CachingConfig
from atlasjax.nn.config import HierarchyConfig, MemoryConfig, ModelConfig, SSMConfig
from atlasjax.presets.architectures import (
    ARCHITECTURES,
    BACKBONES,
    BASELINES,
    ONE_LAYER,
    PUBLISHED,
    PUBLISHED_ONLY,
    pattern,
    rule_name,
)
from atlasjax.presets.sizes import ALL_SIZES, PUBLISHED_SIZES, SIZES, TRUNCATION, Size

__all__ = [
    "ARCHITECTURES",
    "BACKBONES",
    "BASELINES",
    "PRESETS",
    "PUBLISHED_SIZES",
    "SIZES",
    "TRUNCATION",
    "Size",
    "describe",
    "fitted",
    "fitted_field",
    "fitted_names",
    "get_preset",
    "has_memory",
    "model_around",
    "preset_names",
    "rule_name",
]

TABLE = pathlib.Path(__file__).parents[1] / "preset_sizes.json"

# Architectures that need another number of layers: a pattern must divide it, and some parameters must remain for SwiGLU.
_LAYERS: dict[tuple[str, str], int] = {
    ("gated-deltanet-h2", "tiny"): 3,
    **dict.fromkeys(
        (
            ("granite-h", "1.3b"),
            ("granite-h-experts", "1.3b"),
            ("qwen3-next", "1.3b"),
            ("nemotron-h", "1.3b"),
            ("lfm2", "1.3b"),
            ("kimi-linear", "1.3b"),
        ),
        20,
    ),  # a multiple of their pattern
    ("gdn2-mac", "340m"): 22,
    ("rwkv7-mac", "340m"): 20,
    ("rwkv7-mac", "760m"): 21,
}


# State sizes that differ from the published one, where the number of layers alone does not come close enough to the size.
_STATES: dict[tuple[str, str], int] = {("log-linear-mamba2", "tiny"): 80}


def _memory(rule: str, size: Size) -> MemoryConfig:
    if ":" in rule:
        return MemoryConfig(rule)  # a user-defined rule, unchanged
    parameters = inspect.signature(rules.REGISTRY[rule]).parameters
    config = MemoryConfig(rule=rule)
    if "features" in parameters and not parameters["features"].default.is_identity:
        features = "sketch" if rule == "polysketch" else "elementwise"
        config = dataclasses.replace(config, features=features, degree=2)
    takes = set(config.overrides())
    if "newton_schulz_every" not in takes:
        takes -= {"expansion"}
    if parameters.get("cache_window") is None or parameters["cache_window"].default is None:
        takes -= {"cache_window"}  # a rule that keeps every token
    overrides = {name: x for name, x in size.memory.items() if name in takes}
    return dataclasses.replace(config, **overrides, truncation=size.truncation.get(rule))


def _hierarchical(config: MemoryConfig, hierarchy: HierarchyConfig) -> MemoryConfig:
    """The memory with a hierarchy, whose chunks are whole numbers of Muon's writes."""
    every = config.newton_schulz_every
    if every is not None:
        every = math.gcd(every, *hierarchy.local_chunks)
    return dataclasses.replace(config, hierarchy=hierarchy, newton_schulz_every=every)


def _fields(changes: dict[str, Any], size_name: str, architecture: str | None = None) -> dict[str, Any]:
    """The fields of the config, except those that `_fit` chooses."""
    changes, size = dict(changes), ALL_SIZES[size_name]
    mixer = changes["mixer"]
    mixers = set(pattern(mixer))
    if "memory" in changes:
        changes["memory"] = _memory(changes["memory"], size)
    if "caching" in changes:
        caching = CachingConfig(changes.pop("caching"), segment_size=size.cached_segment)
        changes["memory"] = dataclasses.replace(changes["memory"], caching=caching, truncation=None)
    if changes.pop("hierarchy", False):
        changes["memory"] = _hierarchical(changes["memory"], size.hierarchy)
    if "inner_loop" in changes:
        periods = tuple(multiple * size.inner_loop.chunk for multiple in changes["inner_loop"])
        changes["inner_loop"] = dataclasses.replace(size.inner_loop, periods=periods)
    if mixer in ONE_LAYER:
        layers = size.fields["num_layers"]
        memory_layer = round(3 * layers / 4) - 1  # the ninth of twelve
        changes["mixer"] = tuple(mixer if i == memory_layer else "swa" for i in range(layers))
        mixers = set(changes["mixer"])
    changes |= {name: config for name, config in size.blocks.items() if name in mixers}
    if "sampling" in changes:
        changes["elastic"] = dataclasses.replace(changes["elastic"], sampling=changes.pop("sampling"))
    if mixers & {"swa", "mac", "mag", "mal"}:
        persistent = 0 if "swa" in mixers else 4 if size_name == "tiny" else 16
        changes["attention"] = dataclasses.replace(size.attention, persistent_tokens=persistent)
    if mixers & {"mamba2", "mamba3", "log_linear_mamba2"}:
        state = _STATES.get((architecture or "", size_name), size.mamba2_state)
        changes["ssm"] = dataclasses.replace(changes.get("ssm", SSMConfig()), state_dim=state)
    if "experts" in changes:  # the shared network is half as wide as the model
        changes["experts"] = dataclasses.replace(changes["experts"], shared_width=size.fields["dim"] // 2)
    if changes.get("positions") == "learned":
        changes["max_positions"] = size.max_positions
    layers = _LAYERS.get((architecture or "", size_name))
    return {**size.fields, **changes, **({} if layers is None else {"num_layers": layers})}


def _fit(fields: dict[str, Any], size: Size) -> ModelConfig:
    """The config closest to the size's number of parameters, which is linear in the feed-forward width and number of layers.

    Raises:
      ValueError: the narrowest feed-forward network is too wide.
    """
    if size.parameters is None:
        return ModelConfig(**fields)
    if fields.get("ffn") == "none":
        counts = [nn.count_parameters(ModelConfig(**{**fields, "num_layers": layers})) for layers in (1, 2)]
        layers = 1 + round((size.parameters - counts[0]) / (counts[1] - counts[0]))
        return ModelConfig(**{**fields, "num_layers": max(1, layers)})
    least = ModelConfig(**fields, mlp_dim=size.width_step)
    per_column = {"gelu": 2 * least.dim + 1, "relu2": 2 * least.dim}.get(least.network, 3 * least.dim)
    networks = least.num_networks + least.num_expert_layers * (least.experts.number - 1)
    if (own := least.inner_loop) is not None:
        networks += own.layers_of(networks) * len(own.periods)
    per_step = per_column * networks * size.width_step
    count = nn.count_parameters(least)
    steps = 1 + round((size.parameters - count) / per_step)
    if steps < 1:
        rule = f" and rule {least.memory.rule!r}" if has_memory(least) else ""
        raise ValueError(
            f"a model with mixer {least.mixer!r}{rule} has {count:,} parameters even with mlp_dim={least.mlp_dim}; of that size it "
            f"should have about {size.parameters:,.0f}. Choose a larger size, or give the mixer or rule fewer parameters."
        )
    return dataclasses.replace(least, mlp_dim=steps * size.width_step)


def fitted(architecture: str, size: str) -> ModelConfig:
    """The config of a preset, computed by counting parameters."""
    changes = (ARCHITECTURES | PUBLISHED_ONLY)[architecture]
    return _fit(_fields(changes, size, architecture), ALL_SIZES[size])


def fitted_field(config: ModelConfig) -> str:
    """The field that is fitted to the number of parameters."""
    return "mlp_dim" if config.num_networks else "num_layers"


def fitted_names() -> list[tuple[str, str]]:
    """Architecture and size of all presets that are fitted."""
    return [names for names in PRESETS.split.values() if ALL_SIZES[names[1]].parameters is not None]


@functools.cache
def _table() -> dict[str, dict[str, int]]:
    """ "<size> <field>" → architecture → value. `python docs/preset_sizes.py` writes it, so that no command has to count."""
    return json_text.parse(TABLE.read_bytes(), TABLE.name)


def _preset(architecture: str, size: str) -> ModelConfig:
    fields = _fields((ARCHITECTURES | PUBLISHED_ONLY)[architecture], size, architecture)
    for field in ("mlp_dim", "num_layers"):
        if architecture in (counted := _table().get(f"{size} {field}", {})):
            return ModelConfig(**{**fields, field: counted[architecture]})
    return fitted(architecture, size)


class _Presets(Mapping[str, ModelConfig]):
    """`<architecture>-<size>` → its config, computed on first use, because counting parameters takes a moment."""

    def __init__(self) -> None:
        self.split = {
            f"{architecture}-{size}": (architecture, size) for architecture in ARCHITECTURES for size in SIZES
        }
        for size, architectures in PUBLISHED.items():
            self.split |= {f"{architecture}-{size}": (architecture, size) for architecture in architectures}
        self._make = functools.cache(_preset)

    def __getitem__(self, name: str) -> ModelConfig:
        return self._make(*self.split[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.split)

    def __len__(self) -> int:
        return len(self.split)

    def __contains__(self, name: object) -> bool:
        return name in self.split


PRESETS = _Presets()


def get_preset(name: str) -> ModelConfig:
    """The configuration of a preset, e.g. "atlas-tiny" or "gated-deltanet-h2-340m".

    Raises:
      ValueError: there is no such preset. The message suggests the nearest name.
    """
    return lookup("preset", name, PRESETS)


def model_around(part: str | Callable[..., object], size: str = "tiny") -> ModelConfig:
    """A model with a given rule or mixer and as many parameters as the presets of that size, to compare with them.

    Args:
      part: name of a rule or a mixer (a mixer if both have that name), or "package.module:object" for one of your own: a function
        that returns a rule, or a mixer class called as `Class(config, rngs=rngs)`. The object itself is also accepted. The
        library's mixers with a memory ("memory", "mac", "mag", "mal") have that of the preset "atlas".
      size: a name in `SIZES`.

    Raises:
      ValueError: no such rule, mixer or size; the message suggests the nearest name. Or the part alone has too many parameters.
    """
    name, kind = name_of("model_around: part", part), "rule or mixer"
    lookup("size", size, SIZES)
    is_mixer = takes(resolve(kind, name, {**rules.REGISTRY, **nn.MIXERS}), "rngs")
    changes = {"mixer": name} if is_mixer else {"mixer": "memory", "memory": name}
    if name in BACKBONES.values():
        changes["memory"] = "atlas"
    return _fit(_fields(changes, size), SIZES[size])


def preset_names(size: str) -> list[str]:
    """All presets of one size, each model once: if `<rule>-lmm` is the same model as `<rule>`, only the latter.

    Args:
      size: a name in `SIZES`; or in `PUBLISHED_SIZES`, of which only the models of one paper have presets.

    Raises:
      ValueError: there is no such size. The message suggests the nearest name.
    """
    lookup("size", size, ALL_SIZES)
    if size in PUBLISHED:
        return [f"{architecture}-{size}" for architecture in PUBLISHED[size]]
    distinct: dict[str, str] = {}
    for architecture, changes in ARCHITECTURES.items():
        distinct.setdefault(repr(sorted(changes.items())), architecture)
    return [f"{architecture}-{size}" for architecture in distinct.values()]


def has_memory(config: ModelConfig) -> bool:
    """Whether a layer of the model has the memory that `config.memory` describes."""
    return not set(config.mixers).isdisjoint(BACKBONES.values())


def describe(config: ModelConfig, *, length: int | None = None) -> dict[str, int]:
    """The sizes of a model, computed from shapes alone.

    Args:
      config: the model.
      length: number of tokens in a sequence, as max_length of `LanguageModel.init_cache`, for the mixers that use it.

    Returns:
      parameters: the number of parameters.
      non_embedding_parameters: the number of parameters without the embedding and an untied head.
      state_bytes_per_sequence: bytes of the cache of one sequence in decoding, for any length or for `length` tokens.

    Raises:
      ValueError: length is None and a mixer requires it.
    """
    return {
        "parameters": nn.count_parameters(config),
        "non_embedding_parameters": nn.count_parameters(config, embeddings=False),
        "state_bytes_per_sequence": nn.state_bytes(config, length=length),
    }
