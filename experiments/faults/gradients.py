"""Gradients through 8,192 tokens of every rule: finite, and those of the same tokens read in two parts, with a state between."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax import memory, rules
from atlasjax.memory import Gates
from experiments.faults.hard import QUICKLY, dim_of, rule_of
from experiments.faults.run import Case, Slow, WrongError, some

TIME, CHUNK = 8192, 64
_TOLERANCE = 2e-3  # float32 in another order over so many tokens; Newton–Schulz multiplies rounding (SEMANTICS 1.7)


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Every rule with random unit keys and with equal ones."""
    every = [(name, keys) for name in rules.REGISTRY for keys in ("random keys", "equal keys")]
    for name, keys in some(every, most, random.Random(seed)):
        yield f"{name} {keys}", Slow(functools.partial(_graded, name, keys, seed))


def _graded(name: str, keys: str, seed: int, time: int = TIME) -> str:
    rule = rule_of(name, CHUNK)
    dim = dim_of(rule)
    params = memory.init_params(rule, jax.random.key(seed), num_heads=1, key_dim=dim, value_dim=dim)
    q, k, v = jax.random.normal(jax.random.key(seed + 1), (3, 1, time, 1, dim))
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    k = unit(k if keys == "random keys" else jnp.broadcast_to(k[:, :1], k.shape))
    gates = memory.suggested_gates(rule, batch_size=1, time=time, num_heads=1, key_dim=dim)
    given = (params, unit(q), k, v, gates)
    with jax.debug_nans(True):
        whole, parts = (_compiled(name, parts)(*given) for parts in (1, 2))
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        if not np.isfinite(one).all():
            return "wrong"
        error, size = np.abs(one - other).max(initial=0), np.abs(other).max(initial=0)
        if error > _TOLERANCE * max(size, 1e-6):
            raise WrongError(f"error {error:.3g} of {size:.3g}")
    return "right"


@functools.cache
def _compiled(name: str, parts: int) -> Callable[..., Any]:
    loss = functools.partial(_loss, rule_of(name, CHUNK), parts)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)), compiler_options=QUICKLY)


def _loss(rule: Any, parts: int, params: Any, q: jax.Array, k: jax.Array, v: jax.Array, gates: Gates) -> jax.Array:
    """The mean square of the outputs, with the tokens read in equal parts."""
    # A state of softmax memories grows with the text: of several parts, the first one starts with room for all.
    state = None if parts == 1 else memory.init_state(rule, params, batch_size=1, max_length=q.shape[1])
    total, size = jnp.float32(0), q.shape[1] // parts
    for part in range(parts):
        cut = lambda x, part=part: x[:, part * size : (part + 1) * size]
        y, state = memory.scan(rule, params, state, cut(q), cut(k), cut(v), jax.tree.map(cut, gates))
        total += (y**2).sum()
    return total / q.size
