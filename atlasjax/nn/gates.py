"""Computes the gates of a memory from the layer input.

Every gate is a function of one float32 logit (or several channels) per token and head: retention α, momentum decay
θ, write size β and window weights γ are sigmoids, the step size η is max_step · sigmoid, and the threshold δ is softplus. The
initial biases give the values of `memory.suggested`. The initial kernel is small, so the gates vary only slightly between tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from atlasjax import memory
from atlasjax.memory import Gates
from atlasjax.memory.check import check_floating
from atlasjax.memory.products import dense
from atlasjax.memory.suggested import initial_gates
from atlasjax.nn.layers import l2_normalize
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import normal, param

_KERNEL_SCALE = 0.02


def _logit(p: np.ndarray) -> np.ndarray:
    return np.log(p) - np.log1p(-p)


class GateProjection(Module):
    """Gates of every token and head, from one float32 projection of the layer input for all gates of the rule.

    Args:
      rule: the memory rule. It determines which gates there are and their numbers of channels.
      dim: width of the layer input.
      num_heads, key_dim, value_dim: sizes of the memory.
      max_step, similar_keys: see `initial_gates`.
      rngs: source of the initial values.
    """

    def __init__(
        self,
        rule: memory.Rule,
        *,
        dim: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        max_step: float | None,
        similar_keys: bool = False,
        rngs: nnx.Rngs,
    ):
        self.channels = tuple(rule.gate_channels(key_dim, value_dim).items())
        one = rule.without_cache
        muon = one.has_fixed_steps
        initial = initial_gates(one, num_heads, key_dim, value_dim, max_step, similar_keys=similar_keys)
        self.max_step, self.max_steps = initial.max_step, initial.max_steps
        # 1 / (1 − θ) of each head at initialization, if the step size scales with 1 − θ.
        theta = initial.values["momentum_decay"] if similar_keys and "momentum_decay" in initial.values else None
        self.shrink = None if theta is None or muon else tuple(map(tuple, (1.0 / (1.0 - theta)).tolist()))
        self.start_scale = tuple(initial.start_scale.tolist())
        inverse = {
            "step_size": lambda x: _logit(x / np.array(initial.max_steps)),
            "threshold": lambda x: np.log(np.expm1(x)),
            "removal_key": lambda x: x,
            "connector": lambda x: x,
        }
        values = initial.values | {"connector": np.zeros((num_heads, dict(self.channels).get("connector") or 0))}
        biases = [inverse.get(name, _logit)(values[name]) for name, _ in self.channels]
        bias = jnp.asarray(np.concatenate(biases, axis=1), jnp.float32)
        self.kernel = param(normal(rngs, (dim, *bias.shape), _KERNEL_SCALE), "embed", "heads", None)
        self.bias = param(bias, "heads", None)

    def __call__(self, x: jax.Array) -> Gates:
        """Layer input [..., dim] → gates [..., heads] or [..., heads, channels], float32."""
        check_floating("x", x, "GateProjection")
        # By default TPUs multiply float32 matrices in bfloat16, which is not accurate enough for 1 − α.
        highest = jax.lax.Precision.HIGHEST
        logits = dense(x.astype(jnp.float32), self.kernel[...], precision=highest)
        logits = logits + jnp.broadcast_to(self.bias[...], logits.shape)
        gates, start = {}, 0
        for name, channels in self.channels:
            logit = logits[..., start : start + (channels or 1)]
            start += channels or 1
            if name == "threshold":
                gate = jax.nn.softplus(logit)
            elif name == "removal_key":
                gate = l2_normalize(logit)
            elif name == "connector":
                gate = logit
            else:
                gate = jax.nn.sigmoid(logit)
                if name == "step_size":
                    gate = gate * jnp.broadcast_to(jnp.array(self.max_steps, jnp.float32), gate.shape)
            gates[name] = gate if channels else gate[..., 0]
        if self.shrink is not None:
            eta, theta = gates["step_size"], gates["momentum_decay"]
            shrink = jnp.asarray(self.shrink, jnp.float32)
            shrink = shrink if theta.ndim == x.ndim + 1 else shrink[:, 0]
            gates["step_size"] = eta * (1.0 - theta) * jnp.broadcast_to(shrink, theta.shape)
        return Gates(**gates)
