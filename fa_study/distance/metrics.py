"""Every metric of one pair of tensors.

With d = a - b over the pairs whose values are both finite, n pairs, all sums in float64:

=====================  =============================================================================================
max_difference         max |d| (the paper's "Max Difference", arXiv 2405.02803)
mean_difference        mean |d|
signed_difference      mean d: a bias, which a sum of sizes hides (arXiv 2510.04212)
relative_l2            ||d|| / ||a||, Euclidean norms; inf where only a is zero
cosine                 <a, b> / (||a|| ||b||); NaN where a norm is zero
max_ulp                the largest number of representable values between a and b; NaN for different dtypes
                       (Goldberg 1991, with +0 and -0 taken as one value)
equal_fraction         the share of all pairs with the same bits (with the same value, for different dtypes)
wasserstein            W1 = integral of |F - G|, F and G the cumulative distributions of each side's finite values;
                       mean |sort(a) - sort(b)| for equal sizes (Vallender 1974; scipy.stats.wasserstein_distance)
wasserstein_floor      1.75 sigma / sqrt(n): about the W1 between two independent normal samples of this size, since
                       E W1 = 2 / sqrt(pi n) * integral of sqrt(F (1 - F)) (Bobkov and Ledoux 2019); sigma^2 is the
                       mean of both variances
wasserstein_ratio      wasserstein / mean_difference: 1 where the order of the values was kept, towards 0 where they
                       moved through each other; NaN for 0 / 0
nan_a ... zero_b       how many values of a side are NaN, infinite or zero
nonfinite              pairs left out of the elementwise metrics, because a value of theirs is not finite
=====================  =============================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fa_study.distance.elementwise import COUNTS, PairSums, largest_step, pair_sums
from fa_study.distance.histogram import ValueHistogram
from fa_study.distance.values import Flat, blocks
from fa_study.distance.wasserstein import finite_sorted, sorted_wasserstein

COUNT_METRICS = (*COUNTS, "nonfinite")
REAL_METRICS = (
    "max_difference",
    "mean_difference",
    "signed_difference",
    "relative_l2",
    "cosine",
    "max_ulp",
    "equal_fraction",
    "wasserstein",
    "wasserstein_floor",
    "wasserstein_ratio",
)
METRICS = REAL_METRICS + COUNT_METRICS


@dataclass
class Comparison:
    """What is kept of a compared pair: the sums, its W1, and the values' counts where they were counted."""

    sums: PairSums
    wasserstein: float = math.nan
    histograms: tuple[ValueHistogram, ValueHistogram] | None = None
    is_float: bool = True

    def metrics(self) -> dict[str, float]:
        row = self.sums.metrics()
        if self.is_float:
            n = self.sums.pairs
            row["wasserstein"] = self.wasserstein
            row["wasserstein_floor"] = 1.75 * self.sums.sigma() / math.sqrt(n) if n else math.nan
            mean = row["mean_difference"]
            row["wasserstein_ratio"] = self.wasserstein / mean if mean else math.nan
        else:
            row = {
                name: row[name] if name in ("max_difference", "equal_fraction") else math.nan for name in REAL_METRICS
            }
        return row | self.sums.counts | {"nonfinite": self.sums.numel - self.sums.pairs}


def compare(a: Flat, b: Flat, *, overwrite: tuple[bool, bool] = (False, False)) -> Comparison:
    """Compare two flat tensors of the same size.

    Integers and booleans are compared exactly (max_difference, equal_fraction) and get no other metric. A side that
    may be overwritten is sorted in place, which saves the memory of a copy.
    """
    sums = pair_sums(a, b, ulp=a.is_float and b.is_float)
    if not (a.is_float and b.is_float):
        if a.dtype == b.dtype:
            sums.max_d = float(largest_step(a, b))
        return Comparison(sums, is_float=False)
    if a.is_narrow and b.is_narrow:
        both = ValueHistogram.of(a), ValueHistogram.of(b)
        for side, histogram in zip("ab", both):
            for name in ("nan", "inf", "zero"):
                sums.counts[f"{name}_{side}"] = getattr(histogram, name)
        possible = all(h.finite for h in both)
        return Comparison(sums, both[0].wasserstein(both[1]) if possible else math.nan, both)
    sums.counts |= _count(a, "a") | _count(b, "b")
    x, y = (finite_sorted(side, overwrite=free) for side, free in zip((a, b), overwrite))
    return Comparison(sums, sorted_wasserstein(x, y) if len(x) and len(y) else math.nan)


def _count(flat: Flat, side: str) -> dict[str, int]:
    totals = np.zeros(3, dtype=np.int64)
    for block in blocks(flat):
        x = block.float64()
        totals += np.count_nonzero(np.isnan(x)), np.count_nonzero(np.isinf(x)), np.count_nonzero(x == 0)
    return {f"{name}_{side}": int(total) for name, total in zip(("nan", "inf", "zero"), totals)}
