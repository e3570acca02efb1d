"""Gated Associative Memory as a layer, and its ablations."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import gam
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import normal, param


class GAMMixer(Module):
    """Gated Associative Memory as a mixer (G §3): `atlasjax.gam.mix`, a short convolution and a read of a learned memory bank.

    In the paper's model (6 layers, width 3) it cannot recall anything over more than 13 tokens. The memory bank is the same for
    every text, so only the convolution mixes tokens, and at most num_layers · (conv_width − 1) + 1 tokens influence an output.
    With `fusion="global"` only the token itself does (`atlasjax.gam.receptive_field`).

    The state is the last conv_width − 1 inputs, however many tokens were read.

    Initial values: taps and gates are normal with variance 1 / fan-in. The taps are also scaled by `config.output_scale`, because
    there is no output projection. The memory bank is uniform within ±√(6 / (slots + dim)), as published. Biases are zero.

    Args:
      config: dim, gam (slots, fusion, conv_width), dtype, output_scale.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        sizes, dim = config.gam, config.dim
        used = gam.FUSIONS[sizes.fusion]
        self.fusion, self.dim, self.dtype = sizes.fusion, dim, jnp.dtype(config.dtype)
        self.width = sizes.conv_width if "kernel" in used else 1
        scale, bound = config.output_scale * self.width**-0.5, (6 / (sizes.slots + dim)) ** 0.5
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        table = lambda: jax.random.uniform(rngs.params(), (sizes.slots, dim), jnp.float32, -bound, bound)
        make = {
            "kernel": lambda: param(normal(rngs, (self.width, dim), scale), "conv", "embed"),
            "bias": lambda: param(zeros(dim), "embed"),
            "memory": lambda: param(table(), "memory_in", "embed"),
            "gate_kernel": lambda: param(normal(rngs, (dim, 2, dim), dim**-0.5), "embed", None, "heads"),
            "gate_bias": lambda: param(zeros(2, dim), None, "heads"),
        }
        for name, value in make.items():
            setattr(self, name, value() if name in used else None)

    def _params(self) -> gam.Params:
        values = {name: getattr(self, name) for name in gam.Params._fields}
        return gam.Params(**{name: None if value is None else value[...] for name, value in values.items()})

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, max_segments: int | None = None
    ) -> jax.Array:
        """Whole sequences: [batch, time, dim] → [batch, time, dim]. `max_segments` has no effect."""
        return gam.mix(self._params(), x, fusion=self.fusion, segment_ids=segment_ids)[0]

    def init_state(self, batch_size: int, max_length: int | None = None) -> jax.Array:
        """The state before the first token: zeros [batch, conv_width − 1, dim] in the model's dtype. `max_length` has no effect."""
        return gam.init_state(batch_size, self.width, self.dim, self.dtype)

    def extend(self, x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The output for the next piece of a sequence (time ≥ 1) and the next state."""
        if state is None:
            raise ValueError("GAMMixer.extend: state is None; start with init_state.")
        return gam.mix(self._params(), x, state, fusion=self.fusion)
