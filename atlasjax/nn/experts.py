"""A mixture of experts as a feed-forward network: router, experts and a shared network, without dropped tokens.

A token's rows, one for each expert that it chose, are sorted by expert, so that the products of all experts are one
`grouped_products.grouped_product`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from atlasjax.memory.check import check_floating
from atlasjax.memory.products import dense
from atlasjax.mesh_axes import EXPERT_AXES
from atlasjax.nn.config import ModelConfig
from atlasjax.nn.experts_config import ExpertsConfig
from atlasjax.nn.grouped_products import grouped_product
from atlasjax.nn.layers import Linear, ReLU2, SwiGLU
from atlasjax.nn.module import Module
from atlasjax.nn.parameters import normal, param
from atlasjax.nn.partition import dividing, mesh_partition

_NETWORKS: dict[str, type[SwiGLU | ReLU2]] = {"swiglu": SwiGLU, "relu2": ReLU2}


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
      expert: the experts of each token, int32 [..., per_token].
      weight: the factors of their outputs, float32 [..., per_token].
      score: the router's scores of all experts, divided by their sum, float32 [..., number].
    """

    expert: Int[Array, "*tokens chosen"]
    weight: Float[Array, "*tokens chosen"]
    score: Float[Array, "*tokens experts"]


class Load(NamedTuple):
    """How tokens are spread over experts, as sums over tokens.

    Attributes:
      tokens: number of tokens, float32 [].
      chosen: how many of them go to each expert, float32 [number], without gradient.
      score: the sums of `Routing.score`, float32 [number].
    """

    tokens: Float[Array, "*layers"]
    chosen: Float[Array, "*layers experts"]
    score: Float[Array, "*layers experts"]


def route(logits: jax.Array, bias: jax.Array | None, config: ExpertsConfig) -> Routing:
    """The experts of each token.

    Args:
      logits: the router's, float32 [..., number].
      bias: added to the scores by which experts are chosen, [number]. It gets no gradient.
      config: how they are chosen.
    """
    scores = jax.nn.softmax(logits, axis=-1) if config.scores == "softmax" else jax.nn.sigmoid(logits)
    by = jax.lax.stop_gradient(scores if bias is None else scores + jnp.broadcast_to(bias, scores.shape))
    if config.groups > 1:
        grouped = by.reshape(*by.shape[:-1], config.groups, -1)
        _, top = jax.lax.top_k(jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1), config.top_groups)
        is_in = jnp.any(top[..., None] == jnp.arange(config.groups), axis=-2)
        by = jnp.where(is_in[..., None], grouped, -jnp.inf).reshape(by.shape)
    expert = jax.lax.top_k(by, config.per_token)[1]
    weight = jnp.take_along_axis(scores, expert, axis=-1)
    if config.normalize:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    score = scores if config.scores == "softmax" else scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    return Routing(expert, weight if config.scale == 1 else config.scale * weight, score)


def load(routing: Routing, counted: jax.Array | None) -> Load:
    """The load of all tokens. counted: booleans [...], which tokens count. None: all."""
    number = routing.score.shape[-1]
    tokens = tuple(range(routing.score.ndim - 1))
    counts = jnp.ones(routing.score.shape[:-1]) if counted is None else counted.astype(jnp.float32)
    goes = jnp.sum(routing.expert[..., None] == jnp.arange(number), axis=-2)
    total = lambda x: jnp.sum(x * counts[..., None], axis=tokens)
    return Load(jnp.sum(counts), total(goes.astype(jnp.float32)), total(routing.score))


def balance(load: Load) -> jax.Array:
    """The balance loss number · Σ_e f_e P_e (Switch Transformer, arXiv:2101.03961, equations 4 to 6), with the share f_e of the
    tokens that go to an expert, and their mean score P_e. It is `per_token` if all are used equally.

    It is of the whole batch, on all devices, and not of each sequence or device. Qwen's implementations take the mean f and P of
    all layers; here each layer has its own loss, as in the paper.
    """
    tokens = jnp.maximum(load.tokens, 1.0)[..., None]
    number = load.chosen.shape[-1]
    return number * jnp.sum(load.chosen / tokens * load.score / tokens, axis=-1)


def apply_experts(
    x: jax.Array,
    expert: jax.Array,
    weight: jax.Array,
    wide: jax.Array,
    out: jax.Array,
    first: jax.Array | int | None = None,
) -> jax.Array:
    """Σ_j weight_j · network_{expert_j}(x), of all experts or of consecutive ones.

    Args:
      x: [tokens, dim].
      expert: int32 [tokens, per_token], different ones for each token.
      weight: float32 [tokens, per_token].
      wide: the experts' first projections: SwiGLU's, [experts, dim, 2, width], or those of squared ReLU, [experts, dim, width].
      out: their second ones, [experts, width, dim].
      first: number of the first of these experts. None: these are all. Others add nothing.

    Returns:
      float32 [tokens, dim].
    """
    (tokens, chosen), number = expert.shape, wide.shape[0]
    key = expert.reshape(-1)
    rows = tokens * chosen
    if first is not None:
        key = jnp.where((key >= first) & (key < first + number), key - first, number)
        rows = tokens * min(chosen, number)  # a token's experts differ
    order = jnp.argsort(key, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    order = order[:rows]
    sizes = jnp.sum(key[:, None] == jnp.arange(number), axis=0, dtype=jnp.int32)
    # What a product gives after the last group is undefined, and so is the derivative.
    is_mine = None if first is None else (jnp.arange(rows) < jnp.sum(sizes))[:, None]
    masked = lambda rows: rows if is_mine is None else jnp.where(is_mine, rows, jnp.zeros((), rows.dtype))
    # Repeated before they are permuted, so that the derivative is a permutation and a sum, and no scatter with equal indices.
    taken = jnp.repeat(x, chosen, axis=0).at[order].get(unique_indices=True, mode="promise_in_bounds")
    h = grouped_product(masked(taken), wide.reshape(*wide.shape[:2], -1).astype(x.dtype), sizes)
    if wide.ndim == 4:
        gate, other = jnp.split(h, 2, axis=-1)
        h = jax.nn.silu(gate) * other
    else:
        h = jnp.square(jax.nn.relu(h))
    y = masked(grouped_product(h, out.astype(x.dtype), sizes))
    y = y.at[place].get(unique_indices=True, mode="fill", fill_value=0).reshape(tokens, chosen, -1)
    return jnp.einsum("tjd,tj->td", y, weight, preferred_element_type=jnp.float32)


def divided_experts(x: jax.Array, routing: Routing, wide: jax.Array, out: jax.Array) -> jax.Array:
    """`apply_experts` on the current mesh: x [batch, time, dim] → [batch, time, dim], in its dtype.

    Each device has its part of the experts, and, over the axis "tensor", of their widths. Over the axis "expert" it gathers the
    tokens of all devices, applies its experts, and the sums over experts go back to the devices of the tokens.
    """

    def local(of_tokens: Sequence[jax.Array], wide: jax.Array, out: jax.Array, first: jax.Array | None) -> jax.Array:
        x, expert, weight = (array.reshape(-1, array.shape[-1]) for array in of_tokens)
        return apply_experts(x, expert, weight, wide, out, first).reshape(of_tokens[0].shape)

    partition = mesh_partition(x.shape[0], wide.shape[-1], x.shape[1])
    if partition is None:
        return local((x, routing.expert, routing.weight), wide, out, None).astype(x.dtype)
    over = tuple(
        axis for axis in dividing(partition.mesh, EXPERT_AXES, wide.shape[0]) if partition.mesh.shape[axis] > 1
    )
    gathered = tuple(axis for axis in over if axis in partition.batch)

    def part(*arrays: jax.Array) -> jax.Array:
        *of_tokens, wide, out = arrays
        if gathered:
            of_tokens = [jax.lax.all_gather(array, gathered, axis=0, tiled=True) for array in of_tokens]
        first = jax.lax.axis_index(over) * wide.shape[0] if over else None
        y = local(of_tokens, wide, out, first)
        if partition.heads:
            y = jax.lax.psum(y, partition.heads)
        y = y.astype(x.dtype)
        if gathered:
            return jax.lax.psum_scatter(y, gathered, scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, over) if over else y

    tokens = PartitionSpec(partition.batch or None, partition.time or None)
    experts, width = over or None, partition.heads or None
    wide_spec = PartitionSpec(experts, *(None,) * (wide.ndim - 2), width)
    mapped = jax.shard_map(
        part, mesh=partition.mesh, in_specs=(tokens, tokens, tokens, wide_spec, PartitionSpec(experts, width)), out_specs=tokens,
        check_vma=False,
    )  # fmt: skip
    return mapped(x, routing.expert, routing.weight, wide, out)


class Experts(Module):
    """Σ_j w_j · expert_j(x) over the experts that a token chooses, and the shared network's output.

    Args:
      config: the model's config, with `experts`.
      rngs: source of the initial values.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        given, dim, width = config.experts, config.dim, config.expert_width
        self.config = given
        self.router = Linear((dim, given.number), ("embed", None), rngs=rngs)
        # A parameter, so that it is saved and imported with the others.
        self.correction = param(jnp.zeros(given.number, jnp.float32), None) if given.correction_bias else None
        inner, axes = ((2, width), (None, "mlp")) if given.network == "swiglu" else ((width,), ("mlp",))
        self.wide = param(normal(rngs, (given.number, dim, *inner), dim**-0.5), "experts", "embed", *axes)
        scale = config.output_scale
        self.out = param(normal(rngs, (given.number, width, dim), scale * width**-0.5), "experts", "mlp", "embed")
        network = _NETWORKS[given.network]
        shared = given.shared_width
        self.shared = None if shared is None else network(dim, shared, out_scale=scale, rngs=rngs)
        self.shared_gate = Linear((dim, 1), ("embed", None), rngs=rngs) if given.shared_gate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, dim] → [batch, time, dim], dtype of x."""
        return self.observe(x, None)[0]

    def observe(self, x: jax.Array, counted: jax.Array | None) -> tuple[jax.Array, Load]:
        """Like `__call__`, and also returns the load of the experts by the tokens that are `counted` [batch, time] (None: all)."""
        check_floating("x", x, "Experts")
        # In float32 whatever the model's dtype: nearly equal scores decide where a token goes.
        logits = dense(x.astype(jnp.float32), self.router.kernel[...], jnp.float32, jax.lax.Precision.HIGHEST)
        routing = route(logits, None if self.correction is None else self.correction[...], self.config)
        y = divided_experts(x, routing, self.wide[...], self.out[...])
        if self.shared is not None:
            more = self.shared(x)
            y = y + (more if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * more)
        return y, load(routing, counted)
