"""Fingerprints of a checkpoint, which detect damage. They are exact, cheap and independent of the mesh.

The storage format detects truncated files, but a flipped bit or a changed data position would load without an error.
"""

import functools
import json
import zlib
from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.distributed.sharding import parameter_of
from atlasjax.train.state import TrainState


class Fingerprint(TypedDict):
    """Whether all numbers of a state that should be finite are, and the sum of each array by its path."""

    finite: bool
    sums: dict[str, int]


def describe(state: PyTree, unchecked: frozenset[str] = frozenset()) -> Fingerprint:
    """Returns the fingerprint of a state.

    The sum of an array is the sum, modulo 2^32, of its entries' bits as unsigned integers, each times an odd number that depends on
    its position. In integer arithmetic it does not depend on how the array is sharded.

    Args:
      state: pytree of arrays, PRNG keys included.
      unchecked: paths of arrays that may have infinite values.
    """
    sums, finite = jax.device_get(_fingerprint(state, unchecked))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    return {"finite": bool(finite), "sums": {path: int(value) for path, value in zip(paths, sums)}}


def statistics(state: TrainState) -> frozenset[str]:
    """The paths of what an optimizer keeps beside moments of the parameters.

    It may be infinite: the least loss so far is at first.
    """
    shapes = {path: leaf.shape for path, leaf in jax.tree.leaves_with_path(state.params)}
    optimizer = jax.tree_util.GetAttrKey("optimizer")
    return frozenset(
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(state)
        if path[0] == optimizer and parameter_of(path[1:], leaf, shapes) is None
    )


def text_sum(value: object) -> int:
    """The CRC-32 of a JSON value. It does not depend on the order of keys or on white space."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def damaged(saved: dict[str, int], loaded: dict[str, int]) -> list[str]:
    """Returns the paths whose sums differ from those that were saved."""
    return sorted(path for path in saved.keys() | loaded.keys() if saved.get(path) != loaded.get(path))


@functools.partial(jax.jit, static_argnums=1)
def _fingerprint(state: PyTree, unchecked: frozenset[str]) -> tuple[list[jax.Array], jax.Array]:
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(state)]
    floating = [leaf for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating) and path not in unchecked]
    finite = functools.reduce(jnp.logical_and, [jnp.isfinite(leaf).all() for leaf in floating], jnp.bool_(True))
    return [_sum(leaf) for _, leaf in leaves], finite


def _sum(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]  # 8 bytes: two words
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    place = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
