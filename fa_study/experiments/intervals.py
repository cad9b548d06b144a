"""What a handful of seeds can say about a ratio: an interval for it, and the smallest ratio they could have seen.

A distance between two runs varies by factors and not by amounts, so that ratios are averaged as logarithms; each seed
gives one value, since the snapshots of one run are not independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats


def _logarithms(ratios: Sequence[float]) -> np.ndarray:
    values = np.asarray(ratios, dtype=float)
    if len(values) < 2 or not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"an interval takes two or more positive finite ratios, one per seed, got {list(ratios)}")
    return np.log(values)


def log_ratio_interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Geometric mean of ratios over seeds, and its t-interval on the logarithms.

    exp(mean ± t_{n-1} s / sqrt(n)), with s the standard deviation of the n logarithms.

    Returns
    -------
    tuple : (centre, low, high), without unit.

    Raises
    ------
    ValueError : fewer than two ratios, or one that is not positive and finite.
    """
    logarithms = _logarithms(ratios)
    half = stats.t.ppf((1 + confidence) / 2, len(logarithms) - 1) * logarithms.std(ddof=1) / np.sqrt(len(logarithms))
    centre = logarithms.mean()
    return float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): Student's t over the seeds, for numbers that are no ratios."""
    if len(values) < 2:
        raise ValueError(f"an interval takes two or more values, one per seed, got {list(values)}")
    half = stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stats.sem(values)
    mean = np.mean(values)
    return float(mean), float(mean - half), float(mean + half)


def detectable_ratio(ratios: Sequence[float], power: float = 0.8, confidence: float = 0.95) -> float:
    """The smallest true ratio above 1 that as many seeds, scattered as these, tell from 1 with the given power.

    A two-sided t-test on the logarithms finds the effect d = log(ratio) with the probability that a noncentral t
    variable with n - 1 degrees of freedom and noncentrality d sqrt(n) / s exceeds the test's threshold; the equation is
    solved for d. By symmetry 1 / ratio is detected as well as ratio.

    Returns
    -------
    float : a ratio of at least 1; 1 if the ratios do not scatter at all.
    """
    logarithms = _logarithms(ratios)
    count, deviation = len(logarithms), logarithms.std(ddof=1)
    threshold = stats.t.ppf((1 + confidence) / 2, count - 1)
    low, high = 0.0, 100.0
    for _ in range(60):  # bisection on the noncentrality: SciPy's own inverse fails for few degrees of freedom
        middle = (low + high) / 2
        found = stats.nct.sf(threshold, count - 1, middle)
        low, high = (middle, high) if found < power else (low, middle)
    return float(np.exp(high * deviation / np.sqrt(count)))
