"""Gated Associative Memory (G: arXiv 2509.00605, §3): a short convolution and a learned table, for each token a gated sum.

    local_t  = bias + Σ_j kernel[j] ⊙ x_{t − (width − 1) + j}         depthwise causal convolution      G Eq. 1
    global_t = softmax(x_t Mᵀ) M                                       no scale; M: [slots, dim]         G Eq. 2–4
    y_t      = σ(g_t) ⊙ local_t + σ(h_t) ⊙ global_t,   g, h = x W + b  `gated`, the published fusion     G Eq. 5–6

Ablations: `sum` adds the two paths without gates; `global` and `local` are one path alone, without a gate.

**What it cannot do.** The "global" path reads a table of trained parameters, the same for every text: it mixes no tokens. Tokens
meet in the convolution alone, so a token sees itself and the width − 1 tokens before it, and L layers see L · (width − 1) + 1
tokens: 13 in the paper's model (6 layers, width 3), and 1 without the convolution. Nothing further back can influence the
output, whatever is trained: it cannot do recall over more than 13 tokens. See `receptive_field`.

Arrays: float32 parameters; x in float32 or bfloat16, which is the dtype of matmul inputs and outputs. Softmax, sigmoids and the
convolution's sums are float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from atlasjax.mixers.convolution import causal_convolution
from atlasjax.mixers.shapes import check_shapes
from atlasjax.names import lookup

FUSIONS: dict[str, frozenset[str]] = {
    "gated": frozenset({"kernel", "bias", "memory", "gate_kernel", "gate_bias"}),
    "sum": frozenset({"kernel", "bias", "memory"}),
    "global": frozenset({"memory"}),
    "local": frozenset({"kernel", "bias"}),
}
"""Ways to join the two paths → the parameters of each."""


class Params(NamedTuple):
    """Learned, float32; None where the fusion has no use for it (`FUSIONS`).

    Attributes:
      kernel: taps of the convolution, [width, dim]; the last is the token's own.
      bias: of the convolution, [dim].
      memory: M, the table that every token reads, [slots, dim].
      gate_kernel: of both gates, local first, [dim, 2, dim].
      gate_bias: [2, dim].
    """

    kernel: jax.Array | None = None
    bias: jax.Array | None = None
    memory: jax.Array | None = None
    gate_kernel: jax.Array | None = None
    gate_bias: jax.Array | None = None


_AXES = {
    "x": "batch time dim",
    "kernel": "width dim",
    "bias": "dim",
    "memory": "slots dim",
    "gate_kernel": "dim gates dim",
    "gate_bias": "gates dim",
}


def receptive_field(num_layers: int, width: int, fusion: str = "gated") -> int:
    """Tokens, itself included, that can influence a token's output through so many layers: 13 for 6 layers of width 3.

    Args:
      num_layers: layers of this kind, one after another; what else is in the model must mix no tokens.
      width: taps of the convolution.
      fusion: a name of `FUSIONS`; "global" sees the token alone.

    Raises:
      ValueError: no such fusion; the message suggests the nearest name.
    """
    has_convolution = "kernel" in lookup("fusion", fusion, FUSIONS)
    return num_layers * (width - 1) + 1 if has_convolution else 1


def associative_read(x: jax.Array, memory: jax.Array) -> jax.Array:
    """softmax(x Mᵀ) M (G Eq. 2–4), for each token by itself; no scale.

    Args:
      x: [..., dim].
      memory: M, [slots, dim].

    Returns:
      [..., dim], float32: a convex combination of the rows of M.
    """
    memory = memory.astype(x.dtype)
    scores = jnp.einsum("...d,sd->...s", x, memory, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    return jnp.einsum("...s,sd->...d", weights, memory, preferred_element_type=jnp.float32)


def init_state(batch_size: int, width: int, dim: int, dtype: jnp.dtype) -> jax.Array:
    """The width − 1 inputs before the first token, zeros [batch, width − 1, dim]; width 1 for the fusion "global"."""
    return jnp.zeros((batch_size, width - 1, dim), dtype)


def mix(
    params: Params,
    x: jax.Array,
    state: jax.Array | None = None,
    *,
    fusion: str = "gated",
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One layer's mixing of a sequence or of the next piece of one; any cutting into pieces gives the same.

    Args:
      params: what the fusion needs.
      x: normalized layer input [batch, time, dim], any time ≥ 1.
      state: from `init_state` or the last call, [batch, width − 1, dim]; None: before the first token.
      fusion: a name of `FUSIONS`.
      segment_ids: integers [batch, time]; where the id changes, the convolution starts afresh.

    Returns:
      y [batch, time, dim], of x's dtype, and the next state.

    Raises:
      TypeError: an array of a wrong dtype.
      ValueError: an unknown fusion (with the nearest name), a parameter that is missing or not used, a shape that does not fit.
    """
    used = lookup("fusion", fusion, FUSIONS)
    for name, value in params._asdict().items():
        if (value is not None) != (name in used):
            need = "an array" if name in used else "None"
            raise ValueError(f"gam.mix: fusion {fusion!r} needs params.{name} to be {need}, got {_shape(value)}.")
    sizes = check_shapes("gam.mix", _AXES, x=x, **params._asdict())
    if sizes.get("gates", 2) != 2:
        raise ValueError(
            f"gam.mix: params.gate_kernel has {sizes['gates']} gates, should have 2, of shape [dim, 2, dim]."
        )
    expected = (sizes["batch"], sizes.get("width", 1) - 1, sizes["dim"])
    if state is None:
        state = jnp.zeros(expected, x.dtype)
    if state.shape != expected:
        raise ValueError(f"gam.mix: state has shape {state.shape}, should be {expected}, [batch, width − 1, dim].")
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(f"gam.mix: segment_ids has shape {segment_ids.shape}, should be {x.shape[:2]}.")

    paths = []
    if params.kernel is not None:
        local, state = causal_convolution(x, params.kernel, state, params.bias, segment_ids)
        paths.append(local)
    if params.memory is not None:
        paths.append(associative_read(x, params.memory))
    if params.gate_kernel is not None and params.gate_bias is not None:
        gates = jnp.einsum("btd,dge->btge", x, params.gate_kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        gates = jax.nn.sigmoid(gates + params.gate_bias)
        paths = [gates[:, :, i] * path for i, path in enumerate(paths)]
    return sum(paths[1:], paths[0]).astype(x.dtype), state


def _shape(value: jax.Array | None) -> str:
    return "None" if value is None else f"an array of shape {value.shape}"
