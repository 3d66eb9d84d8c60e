"""Honest statistics: deviations over distinct seeds, paired differences, and no verdict from one seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np

CONFIDENCE = 0.95
#: The number of seeds behind a paper's deviation: all three papers say three.
PAPER_SEEDS = 3
#: Gauss-Legendre nodes and weights on [-1, 1].
NODES, WEIGHTS = np.polynomial.legendre.leggauss(100)
#: Each step halves the interval of the quantile's angle; a double has 53 binary digits.
BISECTIONS = 60


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
    return Difference(found.mean, two_sided_quantile(found.count - 1) * found.std / math.sqrt(found.count))


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
    return Difference(difference, two_sided_quantile(freedom) * math.sqrt(total))


@cache
def two_sided_quantile(freedom: float) -> float:
    """Return the t for which Student's distribution has a probability of CONFIDENCE between -t and t.

    Written out so that studies do not need scipy. With t = sqrt(freedom) tan(angle), the density becomes
    cos(angle) ** (freedom - 1) up to a constant, on [0, pi / 2). For freedom >= 1, which paired seeds and Welch's
    formula both give, it is smooth: Gauss-Legendre quadrature integrates it almost to the last digit, and bisection
    finds the angle.
    """
    # The constant: the integral over [0, pi / 2] is sqrt(pi) / 2 * gamma(freedom / 2) / gamma((freedom + 1) / 2).
    log_ratio = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    whole = math.sqrt(math.pi) / 2 * math.exp(log_ratio)
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        angle = (low + high) / 2
        points = angle / 2 * (NODES + 1)  # the nodes are on [-1, 1]
        integral = angle / 2 * float(np.dot(WEIGHTS, np.cos(points) ** (freedom - 1)))
        if integral < CONFIDENCE * whole:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan((low + high) / 2)
