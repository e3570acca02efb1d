"""Where a memory is read: positions in [0, t] at which the history is reconstructed (Elastic Memory §2.3).

A sampling is a function (count, length) → positions x_0 … x_{count−1} in [0, length], length = t tokens read. It is no part of
what was learned: a model may be trained with one and run with another.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from atlasjax.elastic.hippo import check_integer, check_positions, reconstruction
from atlasjax.names import lookup

Sampling = Callable[[int, float], Any]


def uniform(count: int, length: float) -> np.ndarray:
    """x_j = j t / count: the newest sample lies one spacing before the end."""
    return np.arange(count) * (length / count)


def uniform_mid(count: int, length: float) -> np.ndarray:
    """x_j = (j + ½) t / count: the middle of each of `count` equal parts."""
    return (np.arange(count) + 0.5) * (length / count)


def exponential(count: int, length: float, alpha: float | None = None) -> np.ndarray:
    """x_m = t (1 − α^m): dense at the end, where the latest tokens are.

    α None takes the one for which the newest sample lies half a token before the end, α^(count−1) = 1 / (2t).

    Raises:
      ValueError: alpha outside of (0, 1).
    """
    if alpha is None:
        alpha = (0.5 / max(length, 1.0)) ** (1 / max(count - 1, 1))
    if not 0 < alpha < 1:
        raise ValueError(f"exponential: alpha must lie in (0, 1), got {alpha!r}.")
    return length * (1 - alpha ** np.arange(count))


SAMPLINGS: dict[str, Sampling] = {"uniform": uniform, "uniform_mid": uniform_mid, "exponential": exponential}
"""By name, for configurations; a sampling of your own that is put in here can be named there."""


def positions(sampling: str | Sampling, count: int, length: float) -> np.ndarray:
    """The positions that a sampling gives, checked.

    Args:
      sampling: a name of `SAMPLINGS`, or any function (count, length) → positions.
      count: L_mem ≥ 1 samples.
      length: t > 0 tokens.

    Returns:
      float64 [count].

    Raises:
      ValueError: an unknown name, an argument out of its range, or positions that are not `count` numbers of [0, length].
    """
    check_integer("samples", count, 1)
    function = lookup("sampling", sampling, SAMPLINGS) if isinstance(sampling, str) else sampling
    if not callable(function):
        raise ValueError(f"sampling must be a name or a function (count, length) → positions, got {sampling!r}.")
    name = getattr(function, "__name__", repr(function))
    x = check_positions(f"the positions of sampling {name!r}", function(count, length), length)
    if x.shape != (count,):
        raise ValueError(f"sampling {name!r} gave {len(x)} positions, should be {count}.")
    return x


def sampled_reconstruction(
    order: int, sampling: str | Sampling, samples: int | None = None, length: float = 1.0
) -> np.ndarray:
    """R of `hippo.reconstruction` at a sampling's positions, float32 [samples, order]; samples None: as many as coefficients.

    Raises:
      ValueError: see `positions` and `hippo.reconstruction`.
    """
    check_integer("order", order, 1)
    count = order if samples is None else samples
    return reconstruction(order, positions(sampling, count, length), length).astype(np.float32)
