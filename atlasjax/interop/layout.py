"""Rearrangement of arrays by a pattern, forwards and backwards.

A pattern "(h k) d -> d h k" names the axes of the peer's tensor on the left and the axes of our array on the right. A group in
parentheses is one axis of the peer's tensor, and "1" is an axis of size one that our array does not have.
"""

import math
import re
from collections.abc import Sequence

import numpy as np


def _parse(pattern: str) -> tuple[list[list[str]], list[str]]:
    left, _, right = pattern.partition("->")
    groups = [(inside or alone).split() for inside, alone in re.findall(r"\(([^)]*)\)|(\S+)", left)]
    return [[name for name in group if name != "1"] for group in groups], right.split()


def peer_shape(pattern: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the peer's tensor, from the shape of our array."""
    groups, ours = _parse(pattern)
    sizes = dict(zip(ours, shape, strict=True))
    return tuple(math.prod(sizes[name] for name in group) for group in groups)


def to_ours(pattern: str, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The peer's tensor in the layout of our array of `shape`."""
    groups, ours = _parse(pattern)
    sizes = dict(zip(ours, shape, strict=True))
    names = [name for group in groups for name in group]
    return tensor.reshape([sizes[name] for name in names]).transpose([names.index(name) for name in ours])


def to_peer(pattern: str, array: np.ndarray) -> np.ndarray:
    """The inverse of `to_ours`."""
    groups, ours = _parse(pattern)
    names = [name for group in groups for name in group]
    return array.transpose([ours.index(name) for name in names]).reshape(peer_shape(pattern, array.shape))
