"""Mamba (Gu & Dao 2023): a selective state space model in a gated block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from atlasjax.mixers import mamba
from atlasjax.nn.attention import output_projection
from atlasjax.nn.baselines.recurrent import RecurrentMixer
from atlasjax.nn.baselines.step_sizes import step_bias
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.layers import CausalConv, Linear, rms_normalize, segment_starts
from atlasjax.nn.parameters import param


class MambaTokens(NamedTuple):
    """x and gate logits z: [batch, time, inner], in the model's dtype; step Δ: x's shape, float32; read and write vectors:
    [batch, time, state] (C and B in Mamba, q and k in Longhorn)."""

    x: jax.Array
    z: jax.Array
    step: jax.Array
    write: jax.Array
    read: jax.Array


class MambaBlock(RecurrentMixer):
    """The block around the recurrences of Mamba and Longhorn:

        x, z = u W_in,  x ← SiLU(conv(x) + b)
        low, B, C = x W_x,  Δ = activation(low W_Δ + b_Δ)       Δ per channel, of rank dt_rank; with
                                                                `ssm.selection_eps` low, B and C each go through an RMS norm first
        out = ((recurrence(x, Δ, B, C) + D ⊙ x) ⊙ SiLU(z)) W_out

    Args:
      config: dim, conv_width, ssm (expand, state_dim, dt_rank, selection_eps), num_layers (for W_out's initial scale), dtype.
      bias: initial value of b_Δ, [expand · dim].
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, bias: jax.Array, *, rngs: nnx.Rngs):
        ssm = config.ssm
        inner = ssm.expand * config.dim
        rank = config.resolved_dt_rank
        self.dtype = jnp.dtype(config.dtype)
        self.inner, self.state_dim, self.rank, self.selection_eps = inner, ssm.state_dim, rank, ssm.selection_eps
        self.inputs = Linear((config.dim, 2, inner), ("embed", None, "heads"), rngs=rngs)
        self.conv = CausalConv(config.conv_width, (inner,), ("heads",), rngs=rngs)
        self.conv_bias = param(jnp.zeros(inner, jnp.float32), "heads")
        self.selection = Linear((inner, rank + 2 * ssm.state_dim), ("heads", "rank"), rngs=rngs)
        self.step = Linear((rank, inner), ("rank", "heads"), rngs=rngs)
        bound = rank**-0.5
        self.step.kernel[...] = jax.random.uniform(rngs.params(), (rank, inner), jnp.float32, -bound, bound)
        self.step_bias = param(bias, "heads")
        self.D = param(jnp.ones(inner, jnp.float32), "heads")
        self.out = output_projection(config, rngs, inner=inner)

    def activate(self, logits: jax.Array) -> jax.Array:
        """Δ from its logits."""
        raise NotImplementedError

    def start_inputs(self, batch_size: int, dtype: jnp.dtype) -> jax.Array:
        return self.conv.init_state(batch_size, dtype)

    def project(self, x, inputs, segment_ids):
        projected = self.inputs(x)
        mixed, inputs = self.conv(projected[:, :, 0], inputs, segment_ids)
        mixed = jax.nn.silu(mixed + self.conv_bias[None, None]).astype(x.dtype)
        selected = jnp.split(self.selection(mixed), (self.rank, self.rank + self.state_dim), axis=-1)
        if self.selection_eps is not None:
            selected = [rms_normalize(part, self.selection_eps).astype(x.dtype) for part in selected]
        low, write, read = selected
        step = self.activate(self.step(low).astype(jnp.float32) + self.step_bias[None, None])
        return MambaTokens(mixed, projected[:, :, 1], step, write, read), inputs

    def output(self, y: jax.Array, tokens: MambaTokens) -> jax.Array:
        y = y + (self.D[None, None] * tokens.x.astype(jnp.float32)).astype(y.dtype)
        return self.out(y * jax.nn.silu(tokens.z))


class MambaMixer(MambaBlock):
    """Mamba's block with the selective scan (`atlasjax.mixers.mamba`), A = −exp(A_log) per channel and state.

    Initially A is −1, −2, …, −state_dim, softplus(b_Δ) is log-uniform in [0.001, 0.1], and D is one.

    Args:
      config: as for `MambaBlock`.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, step_bias(rngs, config.ssm.expand * config.dim), rngs=rngs)
        rates = jnp.log(jnp.arange(1, self.state_dim + 1, dtype=jnp.float32))
        self.A_log = param(jnp.tile(rates, (self.inner, 1)), "heads", None)

    def activate(self, logits):
        return jax.nn.softplus(logits)

    def start_recurrence(self, batch_size):
        return mamba.init_state(batch_size, self.inner, self.state_dim)

    def recur(self, tokens, state, segment_ids, max_segments):
        resets = None if segment_ids is None else segment_starts(segment_ids)
        A = -jnp.exp(self.A_log[...])
        return mamba.selective_scan(
            tokens.x, tokens.step, A, tokens.write, tokens.read, state=state, resets=resets
        )  # fmt: skip
