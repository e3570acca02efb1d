"""The models of the needles experiment, and how a trained one is tested with another window or another number of Muon's steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax.memory.suggested import initial_gates
from atlasjax.names import lookup
from atlasjax.nn import ModelConfig
from experiments.mqar.models import model as mqar_model
from experiments.recall.training import Network, language_model

# Most informative first: each line is beside what it is compared with. OmegaNet of the paper has powers as features.
MODELS = {
    "attention": "attention",
    "mamba2": "mamba2",
    "delta": "delta",
    "gated_delta": "gated_delta",
    "titans": "titans",
    "titans-grm": "titans-grm-16",
    "omeganet": "omega-powers",
    "atlas": "atlas",
    "titans-ssc": "titans-ssc-16",
    "titans-soup": "titans-soup-16",
    "omega": "omega",
    "omega-online": "omega-online",
    "omega-matrix": "omega-matrix",
    "dla": "dla",
    "dot": "dot",
    "deep_transformer": "deep_transformer",
    "titans-mag": "titans-mag",
    "titans-mal": "titans-mal",
    "linear": "linear",
    "swa": "swa",
}
# Values with which a trained model is tested besides its own.
WINDOWS = (2, 4, 8, 16)
MUON_STEPS = (1, 2, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A trained model with another amount of computation for each token.

    Attributes:
      setting: "window", c tokens, or "newton_schulz_steps", of Muon.
      value: its value in the test.
    """

    setting: str
    value: int

    def is_of(self, trained: ModelConfig) -> bool:
        """Whether the model was trained with this value."""
        if self.setting not in trained.memory.overrides():
            return False
        changed = dataclasses.replace(trained.memory, **{self.setting: self.value})  # type: ignore[arg-type]
        return changed.build() == trained.memory.build()

    def config(self, trained: ModelConfig) -> ModelConfig:
        """The config of the test. The bound of the step size, which the initial gates derive from the window, is kept."""
        memory, head = trained.memory, trained.head_dim
        assert head is not None
        limit = memory.max_step or initial_gates(memory.build(), trained.num_heads, head, head, None).max_step
        changed = dataclasses.replace(memory, max_step=limit, **{self.setting: self.value})  # type: ignore[arg-type]
        return dataclasses.replace(trained, memory=changed)

    def network(self, trained: ModelConfig) -> Network:
        """The network of the test, for the parameters of the trained one.

        A shorter window keeps the weights γ of the newest tokens. In a longer one all older tokens have the weight of the oldest.
        """
        network = language_model(self.config(trained))
        if self.setting != "window":
            return network
        rule, head = trained.memory.build(), trained.head_dim
        channels = {name: size or 1 for name, size in rule.gate_channels(head, head).items()}
        order = list(channels)
        start = sum(channels[name] for name in order[: order.index("window_weights")])
        kept = min(self.value, channels["window_weights"])

        def resized(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            if not any(getattr(key, "key", None) == "gates" for key in path):
                return x
            before, mine, after = jnp.split(x, (start, start + channels["window_weights"]), axis=-1)
            longer = jnp.repeat(mine[..., -1:], self.value - kept, axis=-1)
            return jnp.concatenate((before, mine[..., :kept], longer, after), axis=-1)

        hidden = lambda params, tokens: network.hidden(jax.tree_util.tree_map_with_path(resized, params), tokens)
        return dataclasses.replace(network, hidden=hidden)


def model(name: str, width: int, vocab_size: int) -> ModelConfig:
    """A model of `MODELS` in float32: twice a convolution over 3 tokens and the mixer, each of the four followed by SwiGLU.

    Raises:
      ValueError: no such model, or the heads do not divide the width.
    """
    plain = mqar_model(lookup("model", name, MODELS), width, vocab_size)
    return dataclasses.replace(plain, ffn="swiglu", mlp_dim=2 * width)


def variants(config: ModelConfig) -> list[Variant]:
    """How a trained model is tested besides: with other windows, and with other numbers of Muon's steps, if it has them."""
    memory, head, found = config.memory, config.head_dim, []
    if "memory" not in config.mixer:
        return []
    if "window_weights" in memory.build().gate_channels(head, head):
        found += [Variant("window", value) for value in WINDOWS]
    if "newton_schulz_steps" in memory.overrides():
        found += [Variant("newton_schulz_steps", value) for value in MUON_STEPS]
    return [variant for variant in found if not variant.is_of(config)]
