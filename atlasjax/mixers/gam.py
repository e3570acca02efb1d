"""Gated Associative Memory (G: arXiv 2509.00605, §3): a gated sum of a short convolution and a read of a learned memory bank.

    local_t  = bias + Σ_j kernel[j] ⊙ x_{t − (width − 1) + j}         depthwise causal convolution      G §3.2
    global_t = softmax(x_t Mᵀ) M                                       no scale; M: [slots, dim]         G Eq. 1–3
    y_t      = σ(g_t) ⊙ local_t + σ(h_t) ⊙ global_t,   g, h = x W + b  `gated`, the published fusion     G Eq. 4–6

Ablations (G §5.4): `sum` adds the two paths without gates; `global` and `local` are a single path without a gate.

**Limitation.** The "global" path reads a bank of trained parameters that is the same for every text, so it mixes no tokens.
Only the convolution mixes tokens: one layer sees the token itself and the width − 1 tokens before it, and L layers see
L · (width − 1) + 1 tokens. That is 13 in the paper's model (6 layers, width 3), and 1 without the convolution. Earlier tokens
cannot influence the output, so no amount of training enables recall over more than 13 tokens. See `receptive_field`.

Dtypes: parameters are float32. x is float32 or bfloat16, which is also the dtype of matmul inputs and outputs. Softmax, sigmoids
and the convolution's sums are float32.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from atlasjax import check
from atlasjax.memory.check import ARRAYS, check_floating, check_ids, check_shape, check_sizes
from atlasjax.mixers.convolution import causal_convolution
from atlasjax.mixers.shapes import check_dtype, check_shapes
from atlasjax.names import lookup

FUSIONS: dict[str, frozenset[str]] = {
    "gated": frozenset({"kernel", "bias", "memory", "gate_kernel", "gate_bias"}),
    "sum": frozenset({"kernel", "bias", "memory"}),
    "global": frozenset({"memory"}),
    "local": frozenset({"kernel", "bias"}),
}
"""Fusions of the two paths, with the parameters that each one uses."""


@dataclasses.dataclass(frozen=True)
class GAMConfig:
    """Gated Associative Memory (G §3). It sees only the last num_layers · (conv_width − 1) + 1 tokens.

    So with the paper's 6 layers it cannot recall anything over more than 13 tokens: its memory bank is a trained parameter, the
    same for every text.

    Attributes:
      slots: rows of the memory bank that every token reads, ≥ 1.
      fusion: "gated", as published; or an ablation: "sum" of both paths, only "global" (the memory bank), or only "local" (the
        convolution).
      conv_width: taps of the convolution, ≥ 1. This mixer does not use `ModelConfig.conv_width`.

    Raises:
      ValueError: a field is out of range, or the fusion is unknown.
    """

    slots: int = 512
    fusion: str = "gated"
    conv_width: int = 3

    def __post_init__(self) -> None:
        check.integers(self, {"slots": 1, "conv_width": 1})
        lookup("fusion", self.fusion, FUSIONS)


class Params(NamedTuple):
    """Learned parameters, float32. Parameters that the fusion does not use (`FUSIONS`) are None.

    Attributes:
      kernel: taps of the convolution, [width, dim]; the last one is applied to the token itself.
      bias: bias of the convolution, [dim].
      memory: M, the memory bank that every token reads, [slots, dim].
      gate_kernel: projection of both gates, local first, [dim, 2, dim].
      gate_bias: bias of both gates, [2, dim].
    """

    kernel: Float[Array, "width dim"] | None = None
    bias: Float[Array, " dim"] | None = None
    memory: Float[Array, "slots dim"] | None = None
    gate_kernel: Float[Array, "dim 2 dim"] | None = None
    gate_bias: Float[Array, "2 dim"] | None = None


_AXES = {
    "x": "batch time dim",
    "kernel": "width dim",
    "bias": "dim",
    "memory": "slots dim",
    "gate_kernel": "dim 2 dim",
    "gate_bias": "2 dim",
}


def receptive_field(num_layers: int, width: int, fusion: str = "gated") -> int:
    """Number of tokens, the token itself included, that can influence an output: 13 for 6 layers of width 3.

    Args:
      num_layers: number of stacked GAM layers. The rest of the model must not mix tokens.
      width: taps of the convolution.
      fusion: a name in `FUSIONS`. With "global" a token sees only itself.

    Raises:
      ValueError: unknown fusion; the message suggests the nearest name.
    """
    check.integer("gam.receptive_field", "num_layers", num_layers)
    check.integer("gam.receptive_field", "width", width)
    has_convolution = "kernel" in lookup("fusion", fusion, FUSIONS)
    return num_layers * (width - 1) + 1 if has_convolution else 1


def associative_read(x: Float[Array, "*tokens dim"], memory: Float[Array, "slots dim"]) -> Float[Array, "*tokens dim"]:
    """softmax(x Mᵀ) M (G Eq. 1–3), independently for each token and without a scale.

    Args:
      x: [..., dim].
      memory: M, [slots, dim].

    Returns:
      [..., dim], float32: a convex combination of the rows of M.

    Raises:
      TypeError, ValueError: an argument is not a floating-point array, or of a wrong shape.
    """
    check_shapes("gam.associative_read", _AXES, memory=memory)
    if not isinstance(x, ARRAYS) or x.shape[-1:] != memory.shape[1:]:
        raise ValueError(f"gam.associative_read: x is {_shape(x)}; it must be an array [..., dim={memory.shape[1]}].")
    check_floating("x", x, "gam.associative_read")
    memory = memory.astype(x.dtype)
    scores = jnp.einsum("...d,sd->...s", x, memory, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    return jnp.einsum("...s,sd->...d", weights, memory, preferred_element_type=jnp.float32)


def init_state(batch_size: int, width: int, dim: int, dtype: jnp.dtype) -> Float[Array, "batch past dim"]:
    """The state before the first token: zeros [batch, width − 1, dim] of the given dtype. For the fusion "global", width is 1.

    Raises:
      TypeError, ValueError: a size is not an integer ≥ 1, or dtype is not one of floating point.
    """
    check_sizes("gam.init_state", batch_size=batch_size, width=width, dim=dim)
    check_dtype("gam.init_state", dtype)
    return jnp.zeros((batch_size, width - 1, dim), dtype)


def mix(
    params: Params,
    x: Float[Array, "batch time dim"],
    state: Float[Array, "batch past dim"] | None = None,
    *,
    fusion: str = "gated",
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time dim"], Float[Array, "batch past dim"]]:
    """Applies one GAM layer to a sequence, or to the next piece of one. The result does not depend on how the sequence is split.

    Args:
      params: the parameters that the fusion uses.
      x: normalized layer input [batch, time, dim], any time ≥ 1.
      state: from `init_state` or the previous call, [batch, width − 1, dim]. None before the first token.
      fusion: a name in `FUSIONS`.
      segment_ids: integers [batch, time]. The convolution restarts where the id changes.

    Returns:
      y [batch, time, dim] in x's dtype, and the next state.

    Raises:
      TypeError: an array has the wrong dtype.
      ValueError: unknown fusion (the message suggests the nearest name), a missing or unused parameter, or a wrong shape.
    """
    used = lookup("fusion", fusion, FUSIONS)
    check.instance("gam.mix", "params", params, Params)
    for name, value in params._asdict().items():
        if (value is not None) != (name in used):
            need = "an array" if name in used else "None"
            raise ValueError(f"gam.mix: fusion {fusion!r} needs params.{name} to be {need}, got {_shape(value)}.")
    sizes = check_shapes("gam.mix", _AXES, optional=Params._fields, any_time=True, x=x, **params._asdict())
    expected = (sizes["batch"], sizes.get("width", 1) - 1, sizes["dim"])
    if state is None:
        state = jnp.zeros(expected, x.dtype)
    check_shape("state", state, expected, "gam.mix")
    check_floating("state", state, "gam.mix")
    if segment_ids is not None:
        check_ids(segment_ids, x.shape[:2], "gam.mix")

    paths = []
    if params.kernel is not None:
        local, state = causal_convolution(x, params.kernel, state, params.bias, segment_ids)
        paths.append(local)
    if params.memory is not None:
        paths.append(associative_read(x, params.memory))
    if params.gate_kernel is not None and params.gate_bias is not None:
        gates = jnp.einsum("btd,dge->btge", x, params.gate_kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        gates = jax.nn.sigmoid(gates + params.gate_bias[None, None])
        paths = [gates[:, :, i] * path for i, path in enumerate(paths)]
    return sum(paths[1:], paths[0]).astype(x.dtype), state


def _shape(value: object) -> str:
    return f"an array of shape {value.shape}" if isinstance(value, ARRAYS) else repr(value)[:60]
