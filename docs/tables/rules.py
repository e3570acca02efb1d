"""Tables of the rules and of the sizes of presets."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax import memory, rules
from atlasjax.nn import abstract_model, state_bytes
from atlasjax.plan import forward_flops_per_token
from atlasjax.presets import describe, get_preset, has_memory, rule_name
from atlasjax.train.config import TrainConfig
from atlasjax.train.defaults import default_config
from docs.tables.source import table

PLATFORMS = {"pallas_tpu": "TPU", "pallas_gpu": "GPU"}


@functools.cache
def supported(name: str, implementation: str) -> str:
    """Whether `memory.scan` runs a rule by that name, as the memory of its 340M model: heads of 64, bfloat16."""
    rule = _model_rule(name)
    if _runs(rule, implementation):
        return "yes"
    return "without the bound" if hasattr(rule, "unbounded") and _runs(rule.unbounded(), implementation) else "no"


def _runs(rule: Any, implementation: str) -> bool:
    sizes = {"num_heads": 1, "key_dim": 64, "value_dim": 64}

    def call(key: jax.Array) -> Any:
        params = memory.init_params(rule, key, **sizes)
        q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
        gates = memory.suggested_gates(rule, batch_size=1, time=64, **sizes)
        return memory.scan(rule, params, None, q, q, q, gates, implementation=implementation)

    try:
        jax.eval_shape(call, jax.random.key(0))
    except ValueError:  # an implementation that does not support the call raises before anything is traced
        return False
    return True


def _preset(name: str) -> TrainConfig:
    return default_config(f"{rule_name(name)}-340m")


def _model_rule(name: str) -> Any:
    """The rule as in its 340M model, or with its defaults if that model is a published baseline with its own layer."""
    model = _preset(name).model
    return model.memory.build() if has_memory(model) else rules.REGISTRY[name]()


def choosing_rules() -> str:
    """The costs of each rule as the memory of its 340M model."""

    def line(name: str) -> Iterable[object]:
        config = _preset(name)
        rule, length = _model_rule(name), config.data.sequence_length
        model = abstract_model(config.model)
        state, longer = (state_bytes(model, length=n) for n in (length, 2 * length))
        return (
            f"`{name}`",
            ", ".join(f"`{gate}`" for gate in rule.gate_channels(64)),
            rule.chunk_size,
            f"{state / 2**20:,.1f}" + ("\\*" if state != longer else ""),
            f"{forward_flops_per_token(config) / 1e9:,.2f}",
            *(supported(name, implementation) for implementation in PLATFORMS),
        )

    head = (
        "rule",
        "gates",
        "chunk",
        "state, MiB",
        "GFLOPs per token",
        *(f"{label} kernel" for label in PLATFORMS.values()),
    )
    return table(head, map(line, rules.REGISTRY), right=(2, 3, 4))


def choosing_sizes() -> str:
    """The presets of Atlas."""

    def line(name: str) -> Iterable[object]:
        model = get_preset(name)
        sizes = describe(model)
        state = sizes["state_bytes_per_sequence"]
        return (
            f"`{name}`",
            f"{model.num_layers} × {model.dim}, {model.num_heads}",
            f"{sizes['parameters']:,}",
            f"{state / 2**30:.2f} GiB" if state >= 2**30 else f"{state / 2**20:,.0f} MiB",
        )

    names = [f"atlas-{size}" for size in ("tiny", "170m", "340m", "760m", "1.3b")]
    return table(
        ("preset", "layers × width, heads", "parameters", "state per sequence"), map(line, names), right=(2, 3)
    )
