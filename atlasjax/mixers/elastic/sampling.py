"""Polynomial sampling: the positions in [0, t] at which the history is reconstructed (Elastic Memory §2.3).

A sampling is a function (count, length) → positions x_0 … x_{count−1} in [0, length], where length = t tokens read. It has no
learned parameters, so a model may be trained with one sampling and run with another (§3.5).
"""

from collections.abc import Callable
from numbers import Integral

import numpy as np
from jaxtyping import Float

from atlasjax import check
from atlasjax.mixers.elastic.hippo import check_length, check_positions, reconstruction
from atlasjax.names import lookup

Sampling = Callable[[int, float], np.ndarray]


def uniform(count: int, length: float) -> Float[np.ndarray, " samples"]:
    """x_j = j t / count. The newest sample is one spacing before the end.

    Raises:
      ValueError: count is not an integer ≥ 1, or length is not a number > 0.
    """
    _check(count, length)
    return np.arange(count) * (length / count)


def uniform_mid(count: int, length: float) -> Float[np.ndarray, " samples"]:
    """x_j = (j + ½) t / count: the middle of each of `count` equal parts.

    Raises:
      ValueError: count is not an integer ≥ 1, or length is not a number > 0.
    """
    _check(count, length)
    return (np.arange(count) + 0.5) * (length / count)


def exponential(count: int, length: float, alpha: float | None = None) -> Float[np.ndarray, " samples"]:
    """x_m = t (1 − α^m), dense near the end, where the latest tokens are (App. E.4 lists the same positions in reverse order).

    With α None the newest sample is half a token before the end, α^(count−1) = 1 / (2t).

    Raises:
      ValueError: count is not an integer ≥ 1, length is not a number > 0, or alpha is outside (0, 1).
    """
    _check(count, length)
    check.number("exponential", "alpha", alpha, above=0, below=1, optional=True)
    if alpha is None:
        alpha = (0.5 / max(length, 1.0)) ** (1 / max(count - 1, 1))
    return length * (1 - alpha ** np.arange(count))


def _check(count: object, length: float) -> None:
    check.integer("hippo", "samples", count, 1, kinds=Integral)
    check_length(length)


SAMPLINGS: dict[str, Sampling] = {"uniform": uniform, "uniform_mid": uniform_mid, "exponential": exponential}
"""Samplings by name, for configs. Add your own here to use it by name."""


def positions(sampling: str | Sampling, count: int, length: float) -> Float[np.ndarray, " samples"]:
    """The positions of a sampling, validated.

    Args:
      sampling: a name in `SAMPLINGS`, or any function (count, length) → positions.
      count: L_mem ≥ 1 samples.
      length: t > 0 tokens.

    Returns:
      float64 [count].

    Raises:
      ValueError: the name is unknown, an argument is out of range, or the positions are not `count` numbers in [0, length].
    """
    _check(count, length)
    function = lookup("sampling", sampling, SAMPLINGS) if isinstance(sampling, str) else sampling
    if not callable(function):
        raise ValueError(f"sampling must be a name or a function (count, length) → positions, got {sampling!r}.")
    name = getattr(function, "__name__", repr(function))
    x = check_positions(f"the positions of sampling {name!r}", function(count, length), length)
    if x.shape != (count,):
        raise ValueError(f"sampling {name!r} gave {len(x)} positions, must be {count}.")
    return x


def sampled_reconstruction(
    order: int, sampling: str | Sampling, samples: int | None = None, length: float = 1.0
) -> Float[np.ndarray, "samples order"]:
    """R of `hippo.reconstruction` at a sampling's positions, float32 [samples, order]. `samples` defaults to `order`.

    Raises:
      ValueError: see `positions` and `hippo.reconstruction`.
    """
    check.integer("hippo", "order", order, 1, kinds=Integral)
    count = order if samples is None else samples
    return reconstruction(order, positions(sampling, count, length), length).astype(np.float32)
