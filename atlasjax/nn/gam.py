"""Gated Associative Memory as a layer, and its ablations."""

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import gam
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.parameters import normal, param


class GAMMixer(nnx.Module):
    """The mixer of Gated Associative Memory (G §3): `atlasjax.gam.mix`, a short convolution and the read of a learned table.

    It cannot do recall over more than 13 tokens in the paper's model (6 layers, width 3): the table is the same for every text,
    so tokens meet in the convolution alone, and num_layers · (conv_width − 1) + 1 tokens are all that can influence an output;
    with `fusion="global"` the token alone (`atlasjax.gam.receptive_field`).

    Its state is the last conv_width − 1 inputs, whatever was read.

    Initial values: taps and gates normal with variance 1 / fan-in, the taps scaled by `config.output_scale`, since nothing
    stands between them and the residual stream; the table uniform within ±√(6 / (slots + dim)), as published; biases zero.

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
        """Whole sequences: [batch, time, dim] → [batch, time, dim]; `max_segments` has no effect."""
        return gam.mix(self._params(), x, fusion=self.fusion, segment_ids=segment_ids)[0]

    def init_state(self, batch_size: int, max_length: int | None = None) -> jax.Array:
        """The last inputs, [batch, conv_width − 1, dim] in the model's dtype; `max_length` has no effect."""
        return gam.init_state(batch_size, self.width, self.dim, self.dtype)

    def extend(self, x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The next piece of a sequence, any time ≥ 1, and the next state."""
        return gam.mix(self._params(), x, state, fusion=self.fusion)
