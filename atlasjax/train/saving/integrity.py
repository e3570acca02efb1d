"""Fingerprints of a checkpoint, which detect damage. They are exact, cheap and independent of the mesh.

The storage format detects truncated files, but a flipped bit or a changed data position would load without an error.
"""

import functools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax import json_text
from atlasjax.distributed.sharding import parameter_of
from atlasjax.train.errors import CheckpointError

if TYPE_CHECKING:  # Flax and Optax come with it, which take as long to import as jax: too long for a message to a user
    from atlasjax.train.state import TrainState

JSON = ("position", "config", "integrity")
"""The parts of a checkpoint that are JSON."""
_TOKENIZER = "tokenizer"
Wait = Callable[[], object]


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


def begin(compiles: Callable[..., Wait], state: "TrainState") -> Wait:
    """Begins to compile the program of `describe` for states of these shapes and shardings: `compiles` (program, shapes …)."""
    return compiles(_fingerprint, state, statistics(state))


def statistics(state: "TrainState") -> frozenset[str]:
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


def content(
    sums: Mapping[str, int], positions: object, config: Mapping[str, object], tokenizer: str | None
) -> dict[str, int | str | None]:
    """The JSON that is saved beside a state: the sums of its arrays and of the other JSON, and the tokenizer's fingerprint."""
    texts = _text_sums({"position": positions, "config": config, _TOKENIZER: tokenizer})
    return {**sums, **texts, _TOKENIZER: tokenizer}


def altered(loaded: Mapping[str, PyTree], arrays: Sequence[str], step: int) -> list[str]:
    """The paths of what is not, in every bit, as it was saved.

    Args:
      loaded: parts of a checkpoint by name, all JSON among them.
      arrays: the names of those that are arrays.
      step: the step that its folder is named after.

    Raises:
      CheckpointError: it is another step, or has no checksums to compare with.
    """
    for name in JSON:
        if json_text.is_deep(loaded[name]):
            raise CheckpointError(f"damaged: {name} is nested too deep")
    saved = loaded["integrity"]
    if not isinstance(saved, dict):
        raise CheckpointError(f"damaged: integrity is {str(saved)[:40]!r}; it must be the saved checksums")
    if saved.get(".step") != step:  # the checksum of one integer is that integer
        raise CheckpointError(f"it holds step {saved.get('.step')}: it was moved or copied to this folder")
    state = {name: loaded[name] for name in arrays if name != "progress"}
    state |= loaded["progress"] if "progress" in arrays else {}
    sums = {f".{name}{path}": value for name, tree in state.items() for path, value in describe(tree)["sums"].items()}
    # Checkpoints of older versions have no checksums of position, config and tokenizer.
    texts = _text_sums({**loaded, _TOKENIZER: saved.get(_TOKENIZER)})
    sums |= {name: value for name, value in texts.items() if name in saved}
    prefixes = tuple(f".{name}" for name in state)
    return damaged({path: x for path, x in saved.items() if path in sums or path.startswith(prefixes)}, sums)


def _text_sums(parts: Mapping[str, object]) -> dict[str, int]:
    return {f".{name}": text_sum(parts[name]) for name in ("position", "config", _TOKENIZER)}


def text_sum(value: object) -> int:
    """The CRC-32 of a JSON value. It does not depend on the order of keys or on white space."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def damaged(saved: dict[str, int], loaded: dict[str, int]) -> list[str]:
    """Returns the paths whose sums differ from those that were saved."""
    return sorted(path for path in saved.keys() | loaded.keys() if saved.get(path) != loaded.get(path))


@functools.partial(jax.jit, static_argnums=1)
def _fingerprint(state: PyTree, unchecked: frozenset[str]) -> tuple[list[jax.Array], jax.Array]:
    leaves = jax.tree.leaves_with_path(state)
    found = [_summed(leaf, checked=jax.tree_util.keystr(path) not in unchecked) for path, leaf in leaves]
    finite = functools.reduce(jnp.logical_and, [finite for _, finite in found], jnp.bool_(True))
    return [total for total, _ in found], finite


def _summed(leaf: jax.Array, *, checked: bool) -> tuple[jax.Array, jax.Array]:
    """The sum of an array's entries, and whether all are finite if they are checked."""
    finite = jnp.isfinite(leaf) if checked and jnp.issubdtype(leaf.dtype, jnp.floating) else None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]  # 8 bytes: two words
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
    place = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    terms = bits * (2 * place + 1)
    if finite is None or finite.shape != terms.shape:
        return jnp.sum(terms, dtype=jnp.uint32), jnp.bool_(True) if finite is None else finite.all()
    # Together: on CPUs XLA writes what one sum reads to memory, as large as the array, and fuses it with a reduction of two.
    both = lambda a, b: (a[0] + b[0], a[1] & b[1])
    return jax.lax.reduce((terms, finite), (jnp.uint32(0), jnp.bool_(True)), both, tuple(range(terms.ndim)))
