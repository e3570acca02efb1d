"""Intervals of differences between seeds, and what they decide.

found = compare([2.1, 2.3, 2.2], [2.0, 2.0, 2.1])
found.effect, found.bootstrap, found.student, found.verdict
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

LEVEL = 0.95
LEAST_SEEDS = 3
POWER = 0.8
RESAMPLES = 2000
MOST_RUNS = 10_000  # a power calculation ends here
Interval = tuple[float, float]


def bootstrap(values: Sequence[float]) -> Interval:
    """The 95% BCa bootstrap interval of the mean. Of one value, or of equal values, it is that value."""
    x = np.asarray(values, float)
    return bootstrap_of(lambda seeds: x[seeds].mean(-1), len(x))


def bootstrap_of(statistic: Callable[[np.ndarray], np.ndarray], count: int) -> Interval:
    """The 95% BCa bootstrap interval of a statistic of `count` seeds; of percentiles if leaving out any one seed changes nothing.

    Args:
      statistic: indices of seeds [..., count] → the statistic of these seeds [...].
      count: number of seeds.

    Returns:
      (low, high). Both are the statistic itself if it is the same for every seed.

    Raises:
      ValueError: the interval is undefined, because no resample is below, or none above, the statistic.
    """
    whole, each = np.arange(count), np.arange(count)[:, None]
    without = np.asarray([np.delete(whole, i) for i in whole])
    if count < 2 or np.ptp(statistic(each)) == 0:
        return float(statistic(whole)), float(statistic(whole))
    method = "BCa" if np.ptp(statistic(without)) > 0 else "percentile"  # BCa divides by the spread of the latter
    apply = lambda seeds, axis=-1: statistic(np.moveaxis(seeds, axis, -1).astype(int))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.DegenerateDataWarning)  # raised below, with what it is about
        found = scipy.stats.bootstrap(
            (whole,),
            apply,
            n_resamples=RESAMPLES,
            confidence_level=LEVEL,
            method=method,
            vectorized=True,
            rng=np.random.default_rng(0),
        ).confidence_interval
    low, high = float(found.low), float(found.high)
    if math.isnan(low) or math.isnan(high):
        raise ValueError(f"bootstrap: no BCa interval around {float(statistic(whole))}.")
    return low, high


def student(values: Sequence[float]) -> Interval:
    """The 95% t interval of the mean. (−∞, ∞) of one value."""
    x = np.asarray(values, float)
    if len(x) < 2:
        return -math.inf, math.inf
    half = float(scipy.stats.t.ppf(0.5 + LEVEL / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    return float(x.mean()) - half, float(x.mean()) + half


def runs_needed(spread: float, effect: float) -> int | None:
    """Seeds with which a paired t test at 5% finds this effect with a power of 80%, by the noncentral t distribution.

    Args:
      spread: standard deviation of the differences between seeds.
      effect: mean of the differences.

    Returns:
      The number; at least `LEAST_SEEDS`. None if it is above `MOST_RUNS`, or the effect is zero.
    """
    if effect == 0:
        return None
    if spread == 0:
        return LEAST_SEEDS

    def power(n: int) -> float:
        limit = scipy.stats.t.ppf(0.5 + LEVEL / 2, n - 1)
        found = scipy.stats.nct.sf(limit, n - 1, abs(effect) / spread * math.sqrt(n))
        return float(found)

    low, high = LEAST_SEEDS, MOST_RUNS
    if power(high) < POWER:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle + 1, high)
    return low


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The paired differences of two things over seeds. A positive effect is what the paper says.

    Attributes:
      differences: one for each seed.
      effect: their mean.
      bootstrap, student: 95% intervals of the mean.
    """

    differences: tuple[float, ...]
    effect: float
    bootstrap: Interval
    student: Interval

    @property
    def seeds(self) -> int:
        return len(self.differences)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the differences; None with one seed."""
        return float(np.std(self.differences, ddof=1)) if self.seeds > 1 else None

    @property
    def verdict(self) -> str:
        """ "reproduced", "refuted here" or "undecided", by the rule on the page of evidence.

        Both intervals must exclude zero on the same side. With three seeds the bootstrap alone does so by chance in a quarter of
        all cases, whenever the three differences have one sign; the t interval does not.
        """
        if self.seeds < LEAST_SEEDS:
            return "undecided"
        if min(self.bootstrap[0], self.student[0]) > 0:
            return "reproduced"
        if max(self.bootstrap[1], self.student[1]) < 0:
            return "refuted here"
        return "undecided"

    @property
    def runs_needed(self) -> int | None:
        """Seeds that would decide an effect of this size; None without a spread or if too many."""
        return None if self.spread is None else runs_needed(self.spread, self.effect)


def compare(better: Sequence[float], worse: Sequence[float]) -> Comparison:
    """Compares two sequences with one number for each seed, in the same order of seeds; larger is better.

    Raises:
      ValueError: the sequences are empty, of different lengths, or not finite.
    """
    if len(better) != len(worse) or not len(better):
        raise ValueError(f"compare: needs as many numbers on both sides, got {len(better)} and {len(worse)}.")
    found = tuple(float(a) - float(b) for a, b in zip(better, worse, strict=True))
    if not all(map(math.isfinite, found)):
        raise ValueError(f"compare: a difference is not finite: {found}.")
    return Comparison(found, float(np.mean(found)), bootstrap(found), student(found))


def paired(better: Mapping[Any, float], worse: Mapping[Any, float]) -> Comparison | None:
    """The comparison of two mappings, seed → number, over the seeds that both have; None without any."""
    seeds = sorted(better.keys() & worse.keys())
    return compare([better[seed] for seed in seeds], [worse[seed] for seed in seeds]) if seeds else None


def clearly_above(values: Mapping[int, float], level: float | Mapping[int, float]) -> bool:
    """Whether a thing is above a level by the rule of `Comparison.verdict`.

    Args:
      values: seed → number.
      level: one number, or seed → number, of which the seeds that both have count.
    """
    levels = level if isinstance(level, Mapping) else dict.fromkeys(values, level)
    found = paired(values, levels)
    return found is not None and found.verdict == "reproduced"
