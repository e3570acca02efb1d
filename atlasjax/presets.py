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
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from atlasjax import json_text, nn, rules
from atlasjax.names import lookup, name_of, resolve, takes
from atlasjax.nn.caching_config import CachingConfig
from atlasjax.nn.config import (
    AttentionConfig,
    BlockAttentionConfig,
    BlockRecurrenceConfig,
    ElasticConfig,
    GAMConfig,
    GatedDeltaNetConfig,
    HeadNormConfig,
    InfiniConfig,
    MelodiConfig,
    MemorizingConfig,
    MemoryConfig,
    ModelConfig,
    SSMConfig,
)

_PAPER_VOCABULARY = 32_000
# Muon memories, whose exact gradients grow exponentially with the distance → tokens over which they grow about tenfold at most
# (`MemoryConfig.truncation`). Writes that are rarer than every token make them grow faster.
TRUNCATION = {"atlas": 4096, "atlas_plus_plus": 512}


def _blocks(elastic: ElasticConfig, layers: int) -> dict[str, object]:
    """The configs of the mixers that attend within blocks, with blocks of the same size as Elastic Memory.

    The memories of a model have as many numbers as Elastic Memory's, which is in one layer and keeps a key and a value for each of
    its `order` coefficients. Melodi is in every layer and keeps only values (E §3.1, Table 1).
    """
    size, length = elastic.block_size, elastic.order
    return {
        "elastic": elastic,
        "block_attention": BlockAttentionConfig(size),
        "block_recurrence": BlockRecurrenceConfig(size),
        "memorizing": MemorizingConfig(length, size),
        "infini": InfiniConfig(size),
        "melodi": MelodiConfig(max(1, 2 * length // layers), size),
    }


@dataclasses.dataclass(frozen=True)
class Size:
    """The settings that all architectures of one size share.

    Attributes:
      parameters: the target number of parameters, from the name of the size. None means no target.
      fields: fields of `ModelConfig`.
      width_step: the width of the feed-forward network is a multiple of this.
      attention: the attention of architectures that have it.
      memory: overrides for the rules that accept them.
      mamba2_state: published state size of Mamba-2.
      cached_segment: number of tokens in a segment of Memory Caching (MC: 256).
      truncation: rule → `MemoryConfig.truncation`. A cached memory begins anew in each segment and needs none.
      max_positions: number of positions in models with learned positions.
      blocks: mixer → config, for the mixers that attend within blocks.
    """

    parameters: float | None
    fields: dict[str, Any]
    width_step: int = 64
    attention: AttentionConfig = AttentionConfig(window=2048, segment_size=512)
    memory: dict[str, Any] = dataclasses.field(default_factory=lambda: {"cache_window": 2048})
    mamba2_state: int = 128
    cached_segment: int = 256
    truncation: Mapping[str, int] = dataclasses.field(default_factory=lambda: TRUNCATION)
    max_positions: int = 4096
    blocks: Mapping[str, object] = dataclasses.field(
        default_factory=lambda: _blocks(ElasticConfig(540, block_size=1024), layers=12)
    )


def _paper(parameters: float, layers: int, dim: int, heads: int, *, tied: bool) -> Size:
    fields = {"num_layers": layers, "dim": dim, "num_heads": heads, "tie_embeddings": tied}
    return Size(parameters, {"vocab_size": _PAPER_VOCABULARY, **fields})


SIZES: dict[str, Size] = {
    "tiny": Size(
        1.07e6,
        {"vocab_size": 256, "num_layers": 4, "dim": 128, "num_heads": 4, "dtype": "float32"},
        width_step=8,
        attention=AttentionConfig(window=64, segment_size=64),
        # One orthogonalization per token, with 4 · head_dim hidden units, would cost more than fifty times the rest of the tiny
        # model. With one every 32 tokens and half the width, two CPU cores can train it in minutes.
        memory={"newton_schulz_every": 32, "expansion": 2, "cache_window": 64},
        mamba2_state=64,
        cached_segment=64,
        truncation={"atlas": 1024, "atlas_plus_plus": 256},
        blocks=_blocks(ElasticConfig(64, block_size=64, context=512), layers=4),
        max_positions=512,
    ),
    "170m": _paper(170e6, 12, 768, 16, tied=False),
    "340m": _paper(340e6, 24, 1024, 16, tied=True),
    "760m": _paper(760e6, 24, 1536, 16, tied=True),
    "1.3b": _paper(1.3e9, 18, 2048, 8, tied=False),
}


def _elastic(dim: int, heads: int) -> Size:
    """The sizes of E: 12 layers, heads of 90, blocks of 2,048 and contexts of 32,768. The paper does not state the vocabulary."""
    fields = {"num_layers": 12, "dim": dim, "num_heads": heads, "head_dim": 90}
    blocks = _blocks(ElasticConfig(540, block_size=2048, context=32_768), layers=12)
    return Size(
        None, {"vocab_size": _PAPER_VOCABULARY, **fields}, attention=AttentionConfig(window=2048), blocks=blocks
    )


# Sizes of other papers, only for their own architectures. Their number of parameters is not adjusted.
PUBLISHED_SIZES: dict[str, Size] = {
    "98m": _elastic(720, 8),
    "205m": _elastic(1080, 12),
    "345m": _elastic(1440, 16),
    "22m": Size(
        None,
        {"vocab_size": 10_000, "num_layers": 6, "dim": 512, "num_heads": 8, "dtype": "float32"},
        max_positions=256,
    ),
    "0.8b": Size(
        None,
        {"vocab_size": 248_320, "num_layers": 24, "dim": 1024, "num_heads": 16, "head_dim": 128, "mlp_dim": 3584},
    ),
}
_ALL_SIZES = SIZES | PUBLISHED_SIZES
# The architectures at each of these sizes.
_ELASTIC_TABLE = (
    "transformer++", "transformer-block-recurrence", "swa", "elastic-exp", "elastic-uniform", "elastic-uniform-mid", "memorizing",
    "infini", "melodi",
)  # fmt: skip
_PUBLISHED = {
    **dict.fromkeys(("98m", "205m", "345m"), _ELASTIC_TABLE),
    "22m": ("gam", "gam-sum", "gam-global", "gam-local", "gam-transformer", "gam-mamba"),
    "0.8b": ("qwen3.5",),
}

# The rest of the model in GAM's paper, both for GAM and for its Transformer: LayerNorm, GELU, learned positions, dropout.
_GAM_FRAME = {"ffn": "gelu", "norm": "layer", "norm_eps": 1e-5, "positions": "learned", "dropout": 0.1}

# Published models → the fields of `ModelConfig` that they change (see `ARCHITECTURES`).
BASELINES: dict[str, dict[str, Any]] = {
    "transformer++": {"mixer": "attention"},
    "swa": {"mixer": "swa"},
    "retnet": {"mixer": "retnet", "value_expansion": 2},
    "gla": {"mixer": "gla"},
    "deltanet": {"mixer": "deltanet"},
    "gated-deltanet": {"mixer": "gated_deltanet", "value_expansion": 2},
    "gated-deltanet-h2": {"mixer": ("mamba2", "gated_deltanet", "swa")},
    "mamba": {"mixer": "mamba", "ffn": "none"},
    "mamba2": {"mixer": "mamba2", "ffn": "none"},
    "samba": {"mixer": ("mamba", "swa")},
    "rwkv7": {"mixer": "rwkv7"},
    "longhorn": {"mixer": "longhorn", "ffn": "none"},
    "log-linear": {"mixer": "log_linear"},
    "log-linear++": {"mixer": "log_linear_plus_plus"},
    "log-linear-mamba2": {"mixer": "log_linear_mamba2", "ffn": "none"},
    "gam": {"mixer": "gam", **_GAM_FRAME},
    "gam-sum": {"mixer": "gam", "gam": GAMConfig(fusion="sum"), **_GAM_FRAME},
    "gam-global": {"mixer": "gam", "gam": GAMConfig(fusion="global"), **_GAM_FRAME},
    "gam-local": {"mixer": "gam", "gam": GAMConfig(fusion="local"), **_GAM_FRAME},
    "gam-transformer": {"mixer": "attention", "attention": AttentionConfig(rope_theta=None, bias=True), **_GAM_FRAME},
}

# Only at their published sizes. Qwen3.5 is the language model of Qwen/Qwen3.5-0.8B, as `atlasjax import` reads it. The layers of
# GAM's Mamba have neither a norm nor a residual, as published, and a deeper model would not train.
_PUBLISHED_ONLY: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "mixer": ("gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"),
        "norm": "rms_plus_one",
        "gated_deltanet": GatedDeltaNetConfig(value_heads=16),
        "head_norm": HeadNormConfig(shared=True, eps=128e-6),
        "attention": AttentionConfig(
            rope_theta=1e7, rope_dim=64, qk_norm="head", num_heads=8, kv_heads=2, head_dim=256, value_dim=256, gate=True
        ),
    },
    "gam-mamba": {"mixer": "mamba", **_GAM_FRAME, "ffn": "none", "block": "bare", "ssm": SSMConfig(expand=3)},
}

# Mixers that are used in one layer only, at three quarters of the depth (E §3.1). The other layers are sliding-window attention.
ONE_LAYER: tuple[str, ...] = ("elastic", "memorizing")
BASELINES |= {name: {"mixer": name} for name in ("memorizing", "infini", "melodi")}

# Samplings of Elastic Memory (E §2.3) → suffix of the preset.
_ELASTIC = {"exp": "exponential", "uniform": "uniform", "uniform-mid": "uniform_mid"}
BASELINES |= {f"elastic-{suffix}": {"mixer": "elastic", "sampling": sampling} for suffix, sampling in _ELASTIC.items()}
BASELINES["block-attention"] = {"mixer": "block_attention"}
BASELINES["transformer-block-recurrence"] = {"mixer": "block_recurrence"}

# Rules whose memories are cached (Memory Caching): suffix → aggregation, for the rules of that paper and of ATLAS.
CACHED_RULES = ("linear_attention", "gated_delta_rule", "dla", "swla", "titans", "omeganet", "atlas")
CACHING: tuple[str, ...] = ("residual", "grm", "soup", "ssc")
CACHED_SOFTMAX_RULES = ("dot",)  # they do not support "soup"
LOG_LINEAR_RULES = ("dla", "titans")  # those of Memory Caching's tables; linear attention has `log-linear`

# Backbones around a rule: suffix → mixer.
BACKBONES: dict[str, str] = {"lmm": "memory", "mac": "mac", "mag": "mag", "mal": "mal"}

# Architectures that need another number of layers: a pattern must divide it, and some parameters must remain for SwiGLU.
_LAYERS: dict[tuple[str, str], int] = {
    ("gated-deltanet-h2", "tiny"): 3,
    ("rwkv7-mac", "340m"): 20,
    ("rwkv7-mac", "760m"): 21,
}


# State sizes that differ from the published one, where the number of layers alone does not come close enough to the size.
_STATES: dict[tuple[str, str], int] = {("log-linear-mamba2", "tiny"): 80}


def rule_name(rule: str) -> str:
    """A rule's name within a preset's name: `gated_delta_rule` → `gated-delta-rule`, `atlas_plus_plus` → `atlas++`."""
    return rule.removesuffix("_plus_plus").replace("_", "-") + ("++" if rule.endswith("_plus_plus") else "")


def _architectures() -> dict[str, dict[str, Any]]:
    table = {name: dict(changes) for name, changes in BASELINES.items()}
    for rule in rules.REGISTRY:
        table.setdefault(rule_name(rule), {"mixer": "memory", "memory": rule})
    for rule in rules.REGISTRY:
        for suffix, mixer in BACKBONES.items():
            table[f"{rule_name(rule)}-{suffix}"] = {"mixer": mixer, "memory": rule}
    for rule in CACHED_RULES + CACHED_SOFTMAX_RULES:
        for aggregation in CACHING:
            if aggregation == "soup" and rule in CACHED_SOFTMAX_RULES:
                continue
            table[f"{rule_name(rule)}-{aggregation}"] = {"mixer": "memory", "memory": rule, "caching": aggregation}
    for rule in LOG_LINEAR_RULES:
        table[f"{rule_name(rule)}-log-linear"] = {"mixer": "memory", "memory": rule, "caching": "log_linear"}
    return table


# Architecture → the fields of `ModelConfig` that it changes. In this table, "memory" is the name of a rule, "caching" that of an
# aggregation, and "sampling" that of a sampling of Elastic Memory.
ARCHITECTURES: dict[str, dict[str, Any]] = _architectures()


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


def _fields(changes: dict[str, Any], size_name: str, architecture: str | None = None) -> dict[str, Any]:
    """The fields of the config, except those that `_fit` chooses."""
    changes, size = dict(changes), _ALL_SIZES[size_name]
    mixer = changes["mixer"]
    mixers = {mixer} if isinstance(mixer, str) else set(mixer)
    if "memory" in changes:
        changes["memory"] = _memory(changes["memory"], size)
    if "caching" in changes:
        caching = CachingConfig(changes.pop("caching"), segment_size=size.cached_segment)
        changes["memory"] = dataclasses.replace(changes["memory"], caching=caching, truncation=None)
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
    if mixers & {"mamba2", "log_linear_mamba2"}:
        changes["ssm"] = SSMConfig(state_dim=_STATES.get((architecture or "", size_name), size.mamba2_state))
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
    per_column = 2 * least.dim + 1 if least.ffn == "gelu" else 3 * least.dim
    per_step = per_column * least.num_layers * size.width_step
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
    changes = (ARCHITECTURES | _PUBLISHED_ONLY)[architecture]
    return _fit(_fields(changes, size, architecture), _ALL_SIZES[size])


def fitted_field(config: ModelConfig) -> str:
    """The field that is fitted to the number of parameters."""
    return "num_layers" if config.ffn == "none" else "mlp_dim"


def fitted_names() -> list[tuple[str, str]]:
    """Architecture and size of all presets that are fitted."""
    return [names for names in PRESETS.split.values() if _ALL_SIZES[names[1]].parameters is not None]


@functools.cache
def _table() -> dict[str, dict[str, int]]:
    """ "<size> <field>" → architecture → value. `python docs/preset_sizes.py` writes it, so that no command has to count."""
    return json_text.parse(pathlib.Path(__file__).with_name("preset_sizes.json").read_bytes(), "preset_sizes.json")


def _preset(architecture: str, size: str) -> ModelConfig:
    fields = _fields((ARCHITECTURES | _PUBLISHED_ONLY)[architecture], size, architecture)
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
        for size, architectures in _PUBLISHED.items():
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
    lookup("size", size, _ALL_SIZES)
    if size in _PUBLISHED:
        return [f"{architecture}-{size}" for architecture in _PUBLISHED[size]]
    distinct: dict[str, str] = {}
    for architecture, changes in ARCHITECTURES.items():
        distinct.setdefault(repr(sorted(changes.items())), architecture)
    return [f"{architecture}-{size}" for architecture in distinct.values()]


def has_memory(config: ModelConfig) -> bool:
    """Whether a layer of the model has the memory that `config.memory` describes."""
    return not set(config.pattern).isdisjoint(BACKBONES.values())


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
