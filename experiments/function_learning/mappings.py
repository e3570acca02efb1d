"""The five sequence mappings of ATLAS §6.4: pairs (i_j, o_j) that a memory learns while it reads them.

The paper does not state the scales or the rank. Here inputs are standard normal and every weight is normal with variance
1/fan-in, so that each layer's output has unit size; see README.md.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from atlasjax import check
from atlasjax.memory.axes.structures import gelu
from atlasjax.names import lookup

Pairs = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes shared by the mappings.

    Attributes:
      dim: width d of inputs and outputs.
      length: number of tokens t.
      rank: rank of the low-rank map (setting 1).
      window: number of tokens that a query of the sliding-window attention sees, itself included (setting 5).
    """

    dim: int = 256
    length: int = 4096
    rank: int = 32
    window: int = 512

    def __post_init__(self) -> None:
        check.integers(self, dict.fromkeys(dataclasses.asdict(self), 1))
        if self.rank > self.dim:
            raise ValueError(f"Sizes: rank must be at most dim = {self.dim}, got {self.rank}.")


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    """A weight [out, in] with variance 1/in."""
    return jax.random.normal(key, shape, jnp.float32) / shape[-1] ** 0.5


def _inputs(key: jax.Array, sizes: Sizes) -> jax.Array:
    return jax.random.normal(key, (sizes.length, sizes.dim), jnp.float32)


def random_mlp(key: jax.Array, dim: int) -> Callable[[jax.Array], jax.Array]:
    """x ↦ W1 gelu(W2 x): one hidden layer of width d, [..., d] to [..., d]."""
    outer, inner = (_normal(k, dim, dim) for k in jax.random.split(key))
    return lambda x: gelu(x @ inner.T) @ outer.T


def causal_attention(key: jax.Array, x: jax.Array, window: int | None = None) -> jax.Array:
    """One head of softmax attention with random projections, [t, d] to [t, d]. Scores are divided by √d.

    `window`: each token sees the last `window` tokens, itself included. None means all tokens up to itself.
    """
    projections = (_normal(k, x.shape[-1], x.shape[-1]) for k in jax.random.split(key, 3))
    q, k, v = ((x @ w.T)[:, None, :] for w in projections)
    seen = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=seen)[:, 0]


def low_rank(key: jax.Array, sizes: Sizes) -> Pairs:
    """Setting 1: o_j = Wᵀ i_j with W = X Y, X: [d, rank], Y: [rank, d]."""
    k_in, k_x, k_y = jax.random.split(key, 3)
    i = _inputs(k_in, sizes)
    x_transposed, y_transposed = _normal(k_x, sizes.rank, sizes.dim), _normal(k_y, sizes.dim, sizes.rank)
    return i, i @ x_transposed.T @ y_transposed.T


def mlp(key: jax.Array, sizes: Sizes) -> Pairs:
    """Setting 2: o_j = M*(i_j) with a random MLP M*."""
    k_in, k_mlp = jax.random.split(key)
    i = _inputs(k_in, sizes)
    return i, random_mlp(k_mlp, sizes.dim)(i)


def _attention_then_mlp(key: jax.Array, sizes: Sizes, window: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    k_in, k_attention, k_mlp = jax.random.split(key, 3)
    i = _inputs(k_in, sizes)
    attended = causal_attention(k_attention, i, window)
    return i, attended, random_mlp(k_mlp, sizes.dim)(attended)


def attention_mlp(key: jax.Array, sizes: Sizes) -> Pairs:
    """Setting 3: o_j = M*(a_j), where a = causal attention over i. o_j depends on all inputs up to j."""
    i, _, o = _attention_then_mlp(key, sizes, None)
    return i, o


def attention_as_input(key: jax.Array, sizes: Sizes) -> Pairs:
    """Setting 4: setting 3 with the attention's outputs a_j as the memory's inputs: o_j = M*(a_j), correlated inputs."""
    _, attended, o = _attention_then_mlp(key, sizes, None)
    return attended, o


def window_attention_mlp(key: jax.Array, sizes: Sizes) -> Pairs:
    """Setting 5: setting 3 with sliding-window attention."""
    i, _, o = _attention_then_mlp(key, sizes, sizes.window)
    return i, o


# In the paper's order.
MAPPINGS: dict[str, Callable[[jax.Array, Sizes], Pairs]] = {
    "low_rank": low_rank,
    "mlp": mlp,
    "attention_mlp": attention_mlp,
    "attention_as_input": attention_as_input,
    "window_attention_mlp": window_attention_mlp,
}


def sample(setting: str, seed: int, sizes: Sizes) -> Pairs:
    """Inputs and outputs of a named setting, both float32 [t, d]. The same seed gives every learner the same pairs."""
    return lookup("setting", setting, MAPPINGS)(jax.random.key(seed), sizes)
