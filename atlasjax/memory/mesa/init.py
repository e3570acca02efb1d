"""Fresh parameters and states of a `MesaRule`, and checks of parameters."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from atlasjax.memory.check import check_floating, check_shape
from atlasjax.memory.mesa.spec import MesaSpec
from atlasjax.memory.mesa.state import MesaParams, MesaState
from atlasjax.memory.products import wide_dtype

_START = math.log(math.expm1(0.75))  # softplus of it is 0.75


def init_params(rule: MesaSpec, key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int) -> MesaParams:
    """`Rule.init_params`. Nothing is drawn."""
    weights = {"W": jnp.zeros((num_heads, value_dim, key_dim), jnp.float32)}
    return MesaParams(weights, jnp.full((num_heads, key_dim), _START, jnp.float32))


def ridge_of(rule: MesaSpec, params: MesaParams, dtype: jnp.dtype) -> Float[Array, "... key_dim"]:
    """λ, of all heads or of one."""
    return rule.floor + jax.nn.softplus(params.ridge.astype(dtype))


def start_sums(rule: MesaSpec, params: MesaParams, dtype: jnp.dtype) -> Float[Array, "... value_dim key_dim"]:
    """G_0 = W_0 Diag(λ): with H_0 = 0 the regression's solution is W_0."""
    return params.weights["W"].astype(dtype) * ridge_of(rule, params, dtype)[..., None, :]


def init_state(
    rule: MesaSpec,
    params: MesaParams,
    *,
    batch_size: int,
    max_length: int | None = None,
    dtype: jnp.dtype | None = None,
) -> MesaState:
    """`Rule.init_state`. dtype: of the sums. None means float32, or that of wider parameters."""
    dtype = wide_dtype(params.weights["W"].dtype, params.ridge.dtype) if dtype is None else dtype
    heads, key_dim = params.ridge.shape
    start = start_sums(rule, params, dtype)
    return MesaState(
        key_sums=jnp.zeros((batch_size, heads, key_dim, key_dim), dtype),
        value_sums=jnp.broadcast_to(start, (batch_size, *start.shape)),
        segment=jnp.full(batch_size, -1, jnp.int32),
    )


def check_params(rule: MesaSpec, params: MesaParams, where: str) -> None:
    """Raises TypeError or ValueError if `params` does not belong to a `MesaRule`. The message names the leaf."""
    if not isinstance(params, MesaParams) or not isinstance(params.weights, dict) or list(params.weights) != ["W"]:
        raise TypeError(
            f'{where}: params must be MesaParams with weights {{"W": …}}, got {type(params).__name__}; start with '
            "memory.init_params."
        )
    W = check_shape('params.weights["W"]', params.weights["W"], ("heads", "value_dim", "key_dim"), where)
    check_shape("params.ridge", params.ridge, (W.shape[0], W.shape[2]), where)
    for name, x in (('params.weights["W"]', W), ("params.ridge", params.ridge)):
        check_floating(name, x, where)
