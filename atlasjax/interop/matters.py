"""What decides the function that a model computes: by which a run and the form of a public family are compared."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence

from atlasjax.nn import ModelConfig


def what_matters(config: ModelConfig, names: Sequence[str]) -> dict[str, object]:
    """The values that decide which function our config computes, by name. names: of those that matter in a family alone."""
    found = {name: operator.attrgetter(name)(config) for name in (*_ALWAYS, *names)}
    return found | _attention(config) | _experts(config)


def differing(name: str, ours: object, theirs: object) -> Iterator[tuple[str, object, object]]:
    """The fields in which two values of configs differ, by their options' names.

    Floats are equal up to rounding: theirs may be a product that ours was not computed by.
    """
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        for field in dataclasses.fields(ours):
            yield from differing(f"{name}.{field.name}", getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, rel_tol=1e-9):
            yield name, ours, theirs
    elif ours != theirs:
        yield name, ours, theirs


def _attention(config: ModelConfig) -> dict[str, object]:
    """The values that decide the function of layers with attention. Empty if there are none."""
    given = config.attention
    if not {"attention", "swa"} & set(config.mixers):
        return {}
    names = ("rope_theta", "qk_norm", "gate", "bias", "persistent_tokens", "conv_width")
    found = {f"attention.{name}": getattr(given, name) for name in names}
    if given.bias:
        found["attention.output_bias"] = given.output_bias
    if "swa" in config.pattern:
        found["attention.window"] = given.window
    sizes = config.attention_sizes
    found["attention.scale"] = sizes.key_dim**-0.5 if given.scale is None else given.scale
    return found | {"attention_sizes": sizes, "attention.rope_dim": given.rope_dim or sizes.key_dim}


def _experts(config: ModelConfig) -> dict[str, object]:
    """The values that decide the function of layers with experts. Empty if there are none."""
    if not config.has_experts:
        return {}
    names = (
        "number", "per_token", "network", "scores", "normalize", "scale", "correction_bias", "groups", "top_groups", "shared_width",
        "shared_gate",
    )  # fmt: skip
    found = {f"experts.{name}": getattr(config.experts, name) for name in names}
    return found | {"experts.width": config.expert_width}


# Fields that decide the function of every model.
_ALWAYS = (
    "vocab_size", "dim", "num_layers", "pattern", "caching", "ffn", "blocks", "multipliers", "norm", "embedding_norm", "positions",
    "tie_embeddings", "norm_eps",
)  # fmt: skip
