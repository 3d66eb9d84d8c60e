"""Honest statistics: deviations over distinct seeds, paired differences, and no verdict from one seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
#: The number of seeds behind a paper's deviation: all three papers say three.
PAPER_SEEDS = 3


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over seeds."""

    mean: float
    #: None for one seed.
    std: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + (f" ± {self.std:.1f}" if self.std is not None else " (one seed)")


def spread(values: Sequence[float]) -> Spread | None:
    """Return the mean and deviation of values, one per seed; None if there are no values."""
    if not values:
        return None
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Difference:
    """A difference of means, and the half width of its confidence interval if there are several seeds."""

    mean: float
    half_width: float | None

    @property
    def inside_noise(self) -> bool | None:
        """Whether the interval contains zero; None for one seed, which allows no verdict."""
        return None if self.half_width is None else abs(self.mean) <= self.half_width

    @property
    def verdict(self) -> str:
        """Whether the difference is more than noise, in words; empty for one seed."""
        if self.inside_noise is None:
            return ""
        return "within the noise" if self.inside_noise else "beyond the noise"

    def __str__(self) -> str:
        width = f" ± {self.half_width:.1f}" if self.half_width is not None else " (one seed)"
        return f"{self.mean:+.1f}{width}"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """Compare two methods over the same seeds: Student's interval of the differences, seed by seed.

    Runs of one seed share partition, client schedule and initial state, so their effect on both is not noise.
    """
    found = spread([a - b for a, b in zip(ours, theirs, strict=True)])
    if found is None:
        return None
    if found.std is None:
        return Difference(found.mean, None)
    return Difference(found.mean, _quantile(found.count - 1) * found.std / math.sqrt(found.count))


def against_paper(ours: Spread, mean: float, std: float | None) -> Difference:
    """Compare our mean with a paper's: Welch's interval, or Student's if the paper gives no deviation."""
    difference = ours.mean - mean
    if ours.std is None:
        return Difference(difference, None)
    variances = [(ours.std**2 / ours.count, ours.count)]
    if std is not None:
        variances.append((std**2 / PAPER_SEEDS, PAPER_SEEDS))
    total = sum(variance for variance, _ in variances)
    if not total:
        return Difference(difference, 0.0)
    freedom = total**2 / sum(variance**2 / (count - 1) for variance, count in variances)
    return Difference(difference, _quantile(freedom) * math.sqrt(total))


def _quantile(freedom: float) -> float:
    from scipy.stats import t as student  # here, as it takes half a second that other commands need not wait

    return float(student.ppf((1 + CONFIDENCE) / 2, freedom))
