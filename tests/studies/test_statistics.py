"""Statistics, compared with results by hand and by scipy."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from motley.studies.statistics import Difference, against_paper, paired, spread, two_sided_quantile


def test_std_is_the_sample_standard_deviation() -> None:
    three = spread([60.0, 62.0, 67.0])
    assert three is not None
    assert three.mean == 63.0
    assert three.std == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert str(three) == "63.0 ± 3.6"


def test_one_seed_has_no_verdict() -> None:
    one = spread([60.0])
    assert one is not None
    assert "one seed" in str(one)
    difference = paired([60.0], [50.0])
    assert difference is not None
    assert difference.inside_noise is None
    assert "one seed" in str(difference)
    assert against_paper(one, 59.0, 2.0).inside_noise is None


def test_without_values_there_is_no_result() -> None:
    assert spread([]) is None
    assert paired([], []) is None


def test_paired_interval_is_that_of_the_paired_t_test() -> None:
    ours, theirs = [61.0, 64.0, 70.0, 66.0], [60.0, 62.5, 68.0, 66.5]
    difference = paired(ours, theirs)
    interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert difference is not None
    assert difference.half_width is not None
    assert difference.mean - difference.half_width == pytest.approx(interval.low)
    assert difference.mean + difference.half_width == pytest.approx(interval.high)


def test_pairing_detects_a_difference_smaller_than_the_spread() -> None:
    theirs = [50.0, 60.0, 70.0]
    difference = paired([51.0, 61.1, 70.9], theirs)
    assert difference is not None
    assert difference.inside_noise is False


def test_against_a_paper_is_welchs_interval() -> None:
    ours = spread([64.0, 66.0, 68.0])
    assert ours is not None
    test = stats.ttest_ind_from_stats(ours.mean, ours.std, 3, 67.8, 3.2, 3, equal_var=False)
    difference = against_paper(ours, 67.8, 3.2)
    assert difference.half_width is not None
    freedom = (4 / 3 + 3.2**2 / 3) ** 2 / ((4 / 3) ** 2 / 2 + (3.2**2 / 3) ** 2 / 2)
    assert difference.half_width == pytest.approx(
        stats.t.ppf(0.975, freedom) * abs(difference.mean / test.statistic)
    )
    assert difference.inside_noise is True


def test_a_paper_number_without_deviation_is_taken_as_exact() -> None:
    ours = spread([64.0, 66.0, 68.0])
    assert ours is not None
    interval = stats.ttest_1samp([64.0, 66.0, 68.0], 60.0).confidence_interval(0.95)
    width = against_paper(ours, 60.0, None).half_width
    assert width == pytest.approx((interval.high - interval.low) / 2)
    equal = spread([5.0, 5.0])
    assert equal is not None
    assert against_paper(equal, 5.0, None).inside_noise is True


def test_verdicts_in_words() -> None:
    assert Difference(1.0, 0.5).verdict == "beyond the noise"
    assert Difference(-0.4, 0.5).verdict == "within the noise"
    assert Difference(1.0, None).verdict == ""


@pytest.mark.parametrize("freedom", [1, 1.001, 1.5, 2, 2.7, 3, 4, 9.3, 29, 100, 1000])
def test_the_quantile_is_that_of_scipy(freedom: float) -> None:
    assert two_sided_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-12)


def test_the_quantile_has_its_closed_forms() -> None:
    """For one and two degrees of freedom, the quantile has a closed form."""
    assert two_sided_quantile(1) == pytest.approx(math.tan(math.pi / 2 * 0.95), rel=1e-12)
    assert two_sided_quantile(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-12)
