"""The models of the MQAR experiment at any width. A line of `MODELS` adds one."""

import dataclasses
from typing import Any, Literal

from atlasjax.names import lookup
from atlasjax.nn import ModelConfig
from atlasjax.nn.caching import CachingConfig
from atlasjax.nn.config import AttentionConfig, GAMConfig, MemoryConfig, SSMConfig
from atlasjax.nn.hierarchy_config import HierarchyConfig

CONVOLUTION = "gam"  # with fusion "local" it is just a causal depthwise convolution
CHUNK = 8  # tokens of a chunk of the memories that need chunks: four pairs
WIDE, NARROW = 32, 16  # heads of matrices, and of deep memories or powers, so that both have 32 floats per channel
WINDOW = 16  # tokens that local attention sees


@dataclasses.dataclass(frozen=True)
class Model:
    """The two mixers of a model.

    Attributes:
      mixers: their names, in order.
      memory: fields of `MemoryConfig`, for mixers that have a memory.
      head_dim: size of a head; at most the width.
      fields: further fields of `ModelConfig`.
      alone: without convolutions before the mixers, which have their own, over 4 tokens.
    """

    mixers: tuple[str, str]
    memory: dict[str, Any] | None = None
    head_dim: int = WIDE
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    alone: bool = False


def _mixer(name: str, second: str | None = None, **fields: Any) -> Model:
    return Model((name, second or name), None, WIDE, fields)


def _ssm(name: str) -> Model:
    return _mixer(name, ssm=SSMConfig(state_dim=16, head_dim=16))


def _matrix(rule: str, second: str = "memory", **memory: Any) -> Model:
    return Model(("memory", second), {"rule": rule, **memory})


def _deep(rule: str, mixer: str = "memory", **memory: Any) -> Model:
    fields = {"attention": AttentionConfig(window=WINDOW, segment_size=WINDOW)} if mixer != "memory" else {}
    return Model((mixer, mixer), {"rule": rule, "chunk_size": CHUNK, "expansion": 1, **memory}, NARROW, fields)


def _cached(base: Model, aggregation: Literal["residual", "grm", "soup", "ssc"], segment: int, **more: Any) -> Model:
    assert base.memory is not None
    caching = CachingConfig(aggregation, segment_size=segment, **more)
    return dataclasses.replace(base, memory={**base.memory, "caching": caching})


# The Omega family: deep memories, ℓ2, gradient descent; "omega" has c = 4 and no feature map.
_omega = {"rule": "omeganet", "features": "identity"}
_TITANS, _LINEAR = _deep("titans"), _matrix("linear_attention")

_OF_2026 = ("kda", "gdn2", "mesa", "gated_deltanet", "momentum_deltanet", "comba", "gated_deltaproduct")

# Most informative first: each line is beside what it is compared with.
MODELS: dict[str, Model] = {
    "attention": _mixer("attention"),
    "linear": _LINEAR,
    **{
        f"linear-{aggregation}-8": _cached(_LINEAR, aggregation, 8)  # type: ignore[arg-type]
        for aggregation in ("grm", "ssc", "residual")
    },
    "linear-grm-8-age": _cached(_LINEAR, "grm", 8, connector="age", capacity=16),
    "delta": _matrix("delta_rule"),
    "titans": _TITANS,
    "titans-grm-8": _cached(_TITANS, "grm", 8),
    "titans-soup-8": _cached(_TITANS, "soup", 8),
    "titans-ssc-8": _cached(_TITANS, "ssc", 8),
    "titans-residual-8": _cached(_TITANS, "residual", 8),
    "omega": _deep(**_omega),
    "omega-online": _deep(**_omega, window=1),
    "omega-matrix": Model(("memory", "memory"), {**_omega, "chunk_size": CHUNK, "structure": "matrix"}),
    "omega-powers": _deep("omeganet", features="elementwise"),
    "omega-matrix-powers": Model(
        ("memory", "memory"),
        {"rule": "omeganet", "features": "elementwise", "chunk_size": CHUNK, "structure": "matrix"},
        NARROW,
    ),
    "omega-gated": _deep(**_omega, structure="gated_mlp"),
    "gated_delta": _matrix("gated_delta_rule"),
    "titans-grm-8-age": _cached(_TITANS, "grm", 8, connector="age", capacity=16),
    "atlas": _deep("atlas", features="elementwise"),
    "atlas-gated": _deep("atlas", features="elementwise", structure="gated_mlp"),
    "deep_transformer": _deep("deep_transformer"),
    "dot": _deep("dot"),
    "swdt": _deep("swdt", cache_window=WINDOW),
    "omega-2": _deep(**_omega, window=2),
    "omega-8": _deep(**_omega, window=8),
    "omega-16": _deep(**_omega, window=16),
    "mamba2": _ssm("mamba2"),
    "log_linear_mamba2": _ssm("log_linear_mamba2"),
    "log_linear": _mixer("log_linear"),
    "gla": _mixer("gla"),
    "retnet": _mixer("retnet"),
    "rwkv7": _matrix("rwkv7"),
    "longhorn": _matrix("longhorn"),
    "dla": _deep("dla"),
    "swla": _matrix("swla"),
    "delta+attention": _matrix("delta_rule", "attention"),
    "titans-mac": _deep("titans", "mac"),
    "titans-mag": _deep("titans", "mag"),
    "titans-mal": _deep("titans", "mal"),
    "swa": _mixer("swa", attention=AttentionConfig(window=WINDOW)),
    **{
        f"titans-{aggregation}-{segment}": _cached(_TITANS, aggregation, segment)  # type: ignore[arg-type]
        for segment in (16, 32)
        for aggregation in ("grm", "soup", "ssc", "residual")
    },
    "gam": Model(("gam", "gam"), fields={"gam": GAMConfig(slots=64)}),
    **{name: _mixer(name) for name in _OF_2026},
    "titans-tnt": Model(
        ("memory", "memory"),
        {"rule": "titans", "expansion": 1, "hierarchy": HierarchyConfig(32, (CHUNK,), 32)},
        NARROW,
    ),
    # The layout of the replicated figures: two blocks of Mamba-2, whose convolution is its own.
    **{f"{name}-alone": dataclasses.replace(_ssm(name), alone=True) for name in ("mamba2", "log_linear_mamba2")},
}


def model(name: str, width: int, vocab_size: int) -> ModelConfig:
    """A model of `MODELS`: float32, no feed-forward networks, and twice a convolution over 3 tokens and a mixer.

    The mixers have no convolution of their own, except GAM, which has one in each of its four layers, and those that stand alone.

    Raises:
      ValueError: no such model, or the heads do not divide the width.
    """
    spec = lookup("MQAR model", name, MODELS)
    head_dim = min(spec.head_dim, width)
    if width % head_dim:
        raise ValueError(f"MQAR model {name!r}: heads of {head_dim} do not divide the width {width}.")
    mixers = spec.mixers if spec.alone else [part for mixer in spec.mixers for part in (CONVOLUTION, mixer)]
    fields: dict[str, Any] = {"gam": GAMConfig(fusion="local", conv_width=3)} | spec.fields
    if spec.memory is not None:
        fields["memory"] = MemoryConfig(**spec.memory)
    return ModelConfig(
        vocab_size=vocab_size, dim=width, num_layers=len(mixers), num_heads=width // head_dim, head_dim=head_dim,
        mixer=tuple(mixers), ffn="none", conv_width=4 if spec.alone else 1, dtype="float32", remat=False, **fields,
    )  # fmt: skip
