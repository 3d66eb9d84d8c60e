"""Statistics over seeds: standard deviations, paired differences, and no verdict from one seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np

CONFIDENCE = 0.95
#: The number of seeds behind a paper's standard deviation. All three papers report three.
PAPER_SEEDS = 3
#: Gauss-Legendre nodes and weights on [-1, 1].
NODES, WEIGHTS = np.polynomial.legendre.leggauss(100)
#: Each step halves the interval of the quantile's angle. A double has 53 binary digits.
BISECTIONS = 60


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds."""

    mean: float
    #: None for one seed.
    std: float | None
    count: int

    def __str__(self) -> str:
        return self.text()

    def text(self, one_seed: str | None = None, *, percent: bool = True) -> str:
        """Return mean and deviation as text: with one decimal for percent, else with four digits.

        `one_seed` replaces the remark "(one seed)".
        """
        shape = ".1f" if percent else ".4g"
        if self.std is not None:
            return f"{self.mean:{shape}} ± {self.std:{shape if percent else '.2g'}}"
        return f"{self.mean:{shape}}{' (one seed)' if one_seed is None else one_seed}"


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and standard deviation of values, one per seed, or None without values."""
    if not values:
        return None
    std = stdev(values) if len(values) > 1 else None
    return Spread(fmean(values), std, len(values))


@dataclass(frozen=True)
class Difference:
    """A difference of means, with its confidence interval if there are several seeds."""

    mean: float
    #: Half the width of the interval; None for one seed.
    half_width: float | None

    @property
    def inside_noise(self) -> bool | None:
        """Whether the interval contains zero. None for one seed, which allows no verdict."""
        return None if self.half_width is None else abs(self.mean) <= self.half_width

    @property
    def verdict(self) -> str:
        """Whether the difference is larger than the noise, in words. Empty for one seed."""
        if self.inside_noise is None:
            return ""
        return "within the noise" if self.inside_noise else "beyond the noise"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, percent: bool = True) -> str:
        """Return the difference and its interval as text, rounded like `Spread.text`."""
        shape, width_shape = (".1f", ".1f") if percent else (".4g", ".2g")
        width = " (one seed)"
        if self.half_width is not None:
            width = f" ± {self.half_width:{width_shape}}"
        return f"{self.mean:+{shape}}{width}"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """Compare two methods over the same seeds: Student's interval of the paired differences.

    Runs with the same seed share partition, client schedule and initial state. Pairing removes the
    effect of these on both methods from the noise.
    """
    differences = spread([a - b for a, b in zip(ours, theirs, strict=True)])
    if differences is None:
        return None
    if differences.std is None:
        return Difference(differences.mean, None)
    standard_error = differences.std / math.sqrt(differences.count)
    half_width = two_sided_quantile(differences.count - 1) * standard_error
    return Difference(differences.mean, half_width)


def against_paper(ours: Spread, mean: float, std: float | None) -> Difference:
    """Compare our mean with a paper's by Welch's interval.

    If the paper gives no standard deviation, its mean is taken as exact (Student's interval).
    """
    difference = ours.mean - mean
    if ours.std is None:
        return Difference(difference, None)
    # The variance of each mean, with the number of seeds behind it.
    variances = [(ours.std**2 / ours.count, ours.count)]
    if std is not None:
        variances.append((std**2 / PAPER_SEEDS, PAPER_SEEDS))
    total = sum(variance for variance, _ in variances)
    if total == 0:
        return Difference(difference, 0.0)
    # The Welch-Satterthwaite degrees of freedom.
    freedom = total**2 / sum(variance**2 / (count - 1) for variance, count in variances)
    return Difference(difference, two_sided_quantile(freedom) * math.sqrt(total))


@cache
def two_sided_quantile(freedom: float) -> float:
    """Return the t for which Student's distribution has probability CONFIDENCE between -t and t.

    Implemented here so that studies do not need scipy. With t = sqrt(freedom) tan(angle), the
    density becomes cos(angle) ** (freedom - 1) up to a constant, on [0, pi / 2). For freedom >= 1,
    which paired seeds and Welch's formula both give, it is smooth: Gauss-Legendre quadrature
    integrates it almost to the last digit, and bisection finds the angle.
    """
    # The integral over [0, pi / 2]: sqrt(pi) / 2 * gamma(freedom / 2) / gamma((freedom + 1) / 2).
    log_ratio = math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    full_integral = math.sqrt(math.pi) / 2 * math.exp(log_ratio)
    low, high = 0.0, math.pi / 2
    for _ in range(BISECTIONS):
        angle = (low + high) / 2
        points = angle / 2 * (NODES + 1)  # the nodes are on [-1, 1]
        integral = angle / 2 * float(np.dot(WEIGHTS, np.cos(points) ** (freedom - 1)))
        if integral < CONFIDENCE * full_integral:
            low = angle
        else:
            high = angle
    return math.sqrt(freedom) * math.tan((low + high) / 2)
