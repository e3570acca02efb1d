"""The models of the MAD experiment: those of the MQAR experiment, in MAD's layout. And the decoder of its compression task."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.names import lookup
from atlasjax.nn import ModelConfig
from experiments.mqar.models import CONVOLUTION
from experiments.mqar.models import MODELS as PARTS
from experiments.mqar.models import model as mqar_model
from experiments.recall.training import Network, language_model

NO_MIXER = "none"  # convolutions and SwiGLU alone: what every model of the small layout has besides its mixer

# Most informative first. OmegaNet of the paper has powers as features: it is Atlas without Muon.
MODELS = {
    "attention": "attention",
    NO_MIXER: "attention",
    "gla": "gla",
    "delta": "delta",
    "titans": "titans",
    "omeganet": "omega-powers",
    "atlas": "atlas",
    "gated_delta": "gated_delta",
    "mamba2": "mamba2",
    "dla": "dla",
    "rwkv7": "rwkv7",
    "linear": "linear",
}


def model(name: str, width: int, vocab_size: int, *, convolutions: bool) -> ModelConfig:
    """A model of `MODELS` in float32: MAD's layout, two layers of the mixer and SwiGLU, where the convolutions are the mixers' own.

    With `convolutions` that of the MQAR experiment, for small budgets: every mixer is preceded by a layer with a convolution over 3
    tokens, the mixers have none, and four SwiGLU have half the hidden width. Attention too then soon finds the token before.
    `NO_MIXER` has two of these convolutions, each followed by a whole SwiGLU, in both layouts.

    Raises:
      ValueError: no such model, or the heads do not divide the width.
    """
    part = lookup("MAD model", name, MODELS)
    if name == NO_MIXER:
        alone = mqar_model(part, width, vocab_size)
        return dataclasses.replace(alone, num_layers=2, mixer=(CONVOLUTION,) * 2, ffn="swiglu", mlp_dim=_hidden(width))
    if convolutions:
        return dataclasses.replace(mqar_model(part, width, vocab_size), ffn="swiglu", mlp_dim=_hidden(width) // 2)
    spec, fields = PARTS[part], mqar_model(part, width, vocab_size)
    return dataclasses.replace(
        fields, num_layers=2, mixer=spec.mixers, conv_width=4, ffn="swiglu", mlp_dim=_hidden(width)
    )


def _hidden(width: int) -> int:
    """8/3 of the width, rounded up to a multiple of 16."""
    return -(-8 * width // 48) * 16


def network(config: ModelConfig, length: int, *, decodes_last: bool) -> Network:
    """The model; with `decodes_last` MAD's autoencoder around it.

    The autoencoder adds the sines and cosines of each position to the final hidden state of the last position, and decodes each sum
    alone: twice (norm, linear layer, GELU), then a norm and the model's head.
    """
    plain = language_model(config)
    if not decodes_last:
        return plain
    width = config.dim
    positions = jnp.asarray(_sines(length, width))

    def init(key: jax.Array) -> Any:
        first, second, rest = jax.random.split(key, 3)
        kernels = [jax.random.normal(k, (width, width)) * width**-0.5 for k in (first, second)]
        decoder = {"kernels": kernels, "biases": [jnp.zeros(width)] * 2, "scales": [jnp.ones(width)] * 3}
        return {"model": plain.init(rest), "decoder": decoder}

    def hidden(params: Any, tokens: jax.Array) -> jax.Array:
        decoder = params["decoder"]
        norm = lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps) * scale
        x = plain.hidden(params["model"], tokens)[:, -1:] + positions
        for kernel, bias, scale in zip(decoder["kernels"], decoder["biases"], decoder["scales"][:-1], strict=True):
            x = jax.nn.gelu(norm(x, scale) @ kernel + bias)
        return norm(x, decoder["scales"][-1])

    mask = {
        "model": plain.mask,
        "decoder": {"kernels": [True] * 2, "biases": [False] * 2, "scales": [False] * 3},
    }
    head = lambda params, x: plain.head(params["model"], x)
    return dataclasses.replace(plain, init=init, hidden=hidden, head=head, mask=mask)


def _sines(length: int, width: int) -> np.ndarray:
    """float32 [length, width]: sines, then cosines, of wavelengths from 2π to 20,000π."""
    half = width // 2
    angles = np.arange(length)[:, None] * np.exp(-np.log(1e4) / (half - 1) * np.arange(half))
    return np.concatenate((np.sin(angles), np.cos(angles)), 1).astype(np.float32)


def macro_accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over tokens of the fraction of its labels that the argmax of the logits finds.

    A token that is predicted but never a label counts as zero; one that is neither does not count.

    Args:
      logits: [n, time, vocab_size].
      labels: integers [n, time]; `IGNORE` where nothing is asked.

    Returns:
      A scalar in [0, 1].
    """
    size = logits.shape[-1]
    told, asked = logits.argmax(-1), labels >= 0
    count = lambda token, which: jnp.zeros(size).at[token].add(which.astype(jnp.float32))
    of_label = count(jnp.where(asked, labels, 0), asked)
    of_told = count(told, asked)
    right = count(told, asked & (told == labels))
    used = (of_label + of_told) > 0
    return jnp.sum(right / jnp.maximum(of_label, 1)) / jnp.sum(used)
