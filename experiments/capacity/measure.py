"""Writes n pairs into a memory and reads them back, for all seeds and gates at once."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax import memory
from experiments.capacity.memories import VALUE_DIM, Shape, connector, gates_of
from experiments.rows import at_least_one

# Name → (dimensions in which keys lie, cosine between two of a topic on average, pairs of a topic; None: all pairs are of one).
KEYS = {
    "independent": (256, 0.0, None),
    "narrow": (16, 0.0, None),
    "correlated": (256, 0.5, None),
    "topics": (256, 0.5, 24),
}
TOLERANCE = 0.1  # a pair is stored if ‖M(k) − v‖² is below this; ‖v‖ = 1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings shared by all rows.

    Attributes:
      pairs: numbers of pairs n.
      seeds: reported seeds, counted from 0.
      tuning_seeds: seeds on which gates and shapes are chosen, never reported.
    """

    pairs: list[int] = dataclasses.field(default_factory=lambda: [2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192])
    seeds: int = 10
    tuning_seeds: int = 6

    def __post_init__(self) -> None:
        at_least_one(self, "Recipe", ("seeds", "tuning_seeds"))
        if not self.pairs or self.pairs[0] < 2 or any(a >= b for a, b in zip(self.pairs, self.pairs[1:])):
            raise ValueError(f"Recipe: pairs must be rising numbers of at least 2, got {self.pairs}.")


def draw(keys: str, key_dim: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit keys [count, key_dim] and unit values [count, VALUE_DIM], float32.

    A seed has one list of tokens for all memories. Keys are the tokens under a random isometry into `key_dim` dimensions, or onto
    them if there are fewer, as a model would project them; then they have unit length.
    """
    dim, cosine, topic = KEYS[keys]
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    rng = np.random.default_rng([seed, 0])
    tokens = unit(rng.standard_normal((count, dim)))
    shared = unit(rng.standard_normal((-(-count // topic) if topic else 1, dim)))[np.arange(count) // (topic or count)]
    values = unit(rng.standard_normal((count, VALUE_DIM)))
    tokens = np.sqrt(cosine) * shared + np.sqrt(1 - cosine) * tokens
    rng = np.random.default_rng([seed, 1, key_dim])
    isometry = np.linalg.qr(rng.standard_normal((max(dim, key_dim), min(dim, key_dim))))[0]
    found = tokens @ (isometry if key_dim <= dim else isometry.T)
    return unit(found).astype(np.float32), values.astype(np.float32)


def read_back(
    shape: Shape, keys: str, passes: int, gates: Sequence[dict[str, float]], seeds: Sequence[int], pairs: Any
):
    """Fractions of pairs that are recalled and stored after writing n pairs `passes` times in the same order.

    A pair is recalled if its value is the one of the n values nearest to what its key reads, in angle. It is stored if the squared
    error is below `TOLERANCE`.

    Returns:
      (recalled, stored), each [gates, seeds, pairs].
    """
    drawn = [draw(keys, shape.key_dim, max(pairs), seed) for seed in seeds]
    k, v = (jnp.asarray(np.stack(part)) for part in zip(*drawn, strict=True))
    chosen = [{"connector": 0.0, "erasing": 0.0, "global_step": 0.0, **g} for g in gates]  # 0 where a memory has none
    columns = {name: jnp.asarray([g[name] for g in chosen], jnp.float32) for name in chosen[0]}
    numbers = jnp.asarray(pairs), jnp.asarray(passes)
    recalled, stored = _compiled(shape, k, v, jnp.asarray(seeds), columns, *numbers)
    return np.moveaxis(np.asarray(recalled), 0, -1), np.moveaxis(np.asarray(stored), 0, -1)


def recalled_and_stored(
    shape: Shape, n: jax.Array, passes: jax.Array, k: jax.Array, v: jax.Array, seed: jax.Array, gates: Any
) -> Any:
    """One memory with one list of pairs."""
    rule = shape.rule
    sizes = {"num_heads": 1, "key_dim": shape.key_dim, "value_dim": VALUE_DIM}
    params = memory.init_params(rule, jax.random.key(seed), **sizes)

    def write(i: jax.Array, state: Any) -> Any:
        key, value = k[i % n][None, None], v[i % n][None, None]
        return memory.step(rule, params, state, key, key, value, gates_of(shape, key, gates))[1]

    fresh = memory.init_state(rule, params, batch_size=1, max_length=len(k))
    state = jax.lax.fori_loop(0, n * passes, write, fresh)
    q = k[None, :, None]
    read = memory.read(rule, params, state, q, connector(shape, q, gates["connector"]))[0, :, 0]
    there = jnp.arange(len(k)) < n
    scores = jnp.where(there, read @ v.T, -jnp.inf)
    finite = jnp.all(jnp.isfinite(read), axis=-1)  # a diverged memory recalls nothing
    recalled = finite & (jnp.argmax(scores, axis=-1) == jnp.arange(len(k)))
    stored = finite & (jnp.sum((read - v) ** 2, axis=-1) < TOLERANCE)
    return jnp.mean(recalled, where=there), jnp.mean(stored, where=there)


@jax.jit(static_argnums=0)
def _compiled(shape: Shape, k: Any, v: Any, seeds: Any, gates: Any, pairs: Any, passes: Any) -> Any:
    one = lambda n: jax.vmap(  # over gates, then seeds
        lambda g: jax.vmap(lambda k, v, seed: recalled_and_stored(shape, n, passes, k, v, seed, g))(k, v, seeds)
    )(gates)
    return jax.lax.map(one, pairs)
