"""Intervals of ratios over seeds: known values, coverage and power by simulation."""

import numpy as np
import pytest
from scipy import stats

from fa_study.experiments.intervals import detectable_ratio, log_ratio_interval


def test_the_interval_is_scipys_on_the_logarithms():
    ratios = [1.1, 0.9, 1.3, 1.0]
    centre, low, high = log_ratio_interval(ratios)
    theirs = stats.ttest_1samp(np.log(ratios), 0).confidence_interval(0.95)
    assert centre == pytest.approx(stats.gmean(ratios)) and (low, high) == pytest.approx(np.exp(tuple(theirs)))


def test_it_covers_the_true_ratio_as_often_as_it_says():
    draws = np.exp(0.2 + 0.3 * np.random.default_rng(0).normal(size=(2000, 8)))
    hits = np.mean([low < np.exp(0.2) < high for _, low, high in map(log_ratio_interval, draws)])
    assert abs(hits - 0.95) < 4 * (0.95 * 0.05 / 2000) ** 0.5


def test_a_detectable_ratio_is_found_as_often_as_it_says():
    scatter = np.random.default_rng(0).normal(size=8)
    scatter = 0.3 * (scatter - scatter.mean()) / scatter.std(ddof=1)
    ratio = detectable_ratio(np.exp(scatter))
    draws = np.log(ratio) + 0.3 * np.random.default_rng(1).normal(size=(4000, 8))
    found = (stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05).mean()
    assert abs(found - 0.8) < 4 * (0.8 * 0.2 / 4000) ** 0.5
    assert detectable_ratio([1.5, 1.5]) == 1 and detectable_ratio(np.exp(2 * scatter)) == pytest.approx(ratio**2)


@pytest.mark.parametrize("ratios", [[1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, -2.0]])
def test_what_has_no_interval_is_refused(ratios):
    for function in (log_ratio_interval, detectable_ratio):
        with pytest.raises(ValueError, match="two or more positive finite ratios"):
            function(ratios)
