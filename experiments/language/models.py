"""The models of the experiment. A line of `MODELS` adds one.

All are tiny presets, or a rule in their place, with the same number of parameters: four layers of width 128. Windows of attention,
blocks of Elastic Memory and segments of Memory Caching have 64 tokens, so a context of training has sixteen.
"""

import dataclasses
from collections.abc import Callable

from atlasjax import rules
from atlasjax.memory import MemoryRule, Rule, SoftmaxRule, features, structures
from atlasjax.names import lookup
from atlasjax.nn import ModelConfig

LENGTH = 1024  # tokens of a context in training
NEWTON_SCHULZ_EVERY = 16  # tokens: one for each token would cost many times the rest of the model


def attention(chunk_size: int = 64) -> SoftmaxRule:
    """Softmax attention in the layer of a memory, with the gates and convolutions that Transformer++ has not."""
    return rules.deep_transformer(chunk_size, structures.Matrix())


def atlas(chunk_size: int = 64) -> MemoryRule:
    """Atlas with the memory of the preset of OmegaNet, so that the two differ in the inner optimizer alone."""
    return rules.atlas(chunk_size, features=features.Powers(2), newton_schulz_every=NEWTON_SCHULZ_EVERY)


# Name → preset without its size, or the function of a rule. Each is near what it is compared with.
MODELS: dict[str, str | Callable[..., Rule]] = {
    "titans": "titans",
    "titans-grm": "titans-grm",
    "attention": attention,
    "titans-no-momentum": "titans-no-momentum",
    "omeganet": "omeganet",
    "dla": "dla",
    "retnet-lmm": "retnet-lmm",  # the rule of DLA with a matrix
    "elastic-exp": "elastic-exp",
    "elastic-uniform": "elastic-uniform",
    "swa": "swa",  # Elastic Memory without the memory
    "transformer++": "transformer++",
    "gated-deltanet": "gated-deltanet",
    "atlas": atlas,
    "titans-mag": "titans-mag",
    "gla": "gla",
}


def model(name: str, length: int = LENGTH) -> ModelConfig:
    """A model of `MODELS`. length: tokens of a context in training, which Elastic Memory's samples are chosen for.

    Raises:
      ValueError: no such model; the message suggests the nearest.
    """
    from atlasjax.presets import get_preset, model_around

    what = lookup("model of the language experiment", name, MODELS)
    config = get_preset(f"{what}-tiny") if isinstance(what, str) else model_around(what)
    elastic = dataclasses.replace(config.elastic, context=length)
    return dataclasses.replace(config, elastic=elastic, remat=False)  # the activations of a tiny model fit
