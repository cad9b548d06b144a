"""Three documented ways to make one number of many tensors' distances.

The paper does not say which one it used, so all are reported:

* mean: the plain mean of a metric over tensors, each tensor one vote;
* weighted: the mean weighted by the tensors' sizes;
* pooled: the metric of all values put into one long tensor (for max_difference the maximum; for wasserstein the
  distance between the distributions of all values, in which values of different tensors mix).

Counts (NaN, infinities, zeros, non-finite pairs) are totals in all three. A metric that is NaN or infinite for a
tensor, such as the relative L2 distance from an all-zero tensor, takes no part in the mean and the weighted mean.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fa_study.elementwise import PairSums
from fa_study.histogram import ValueHistogram, counted_wasserstein
from fa_study.metrics import COUNT_METRICS, METRICS, REAL_METRICS, Comparison
from fa_study.wasserstein import sorted_wasserstein

AVERAGES = ("mean", "weighted", "pooled")


class Pool:
    """Collects compared tensors. Keeps counts of narrow values, and wider values themselves while they are few."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.sums = PairSums()
        self.counted: tuple[dict[torch.dtype, ValueHistogram], ...] = ({}, {})
        self.kept: tuple[list[np.ndarray], list[np.ndarray]] | None = ([], [])

    def add(self, comparison: Comparison, row: dict[str, float]) -> None:
        self.rows.append(row)
        self.sums = self.sums.merge(comparison.sums)
        if comparison.histograms:
            for pooled, histogram in zip(self.counted, comparison.histograms):
                pooled.setdefault(histogram.dtype, ValueHistogram(histogram.dtype)).merge(histogram)
        elif comparison.sorted is None:
            self.kept = None
        elif self.kept is not None:
            for pooled, values in zip(self.kept, comparison.sorted):
                pooled.append(values)

    def forget(self) -> None:
        """Drop the wider values; without them there is no pooled W1 of tensors that have any."""
        if self.kept is not None and any(self.kept):
            self.kept = None

    def aggregates(self) -> list[dict]:
        """The three rows; none where nothing was added."""
        if not self.rows:
            return []
        numel = np.array([row["numel"] for row in self.rows], dtype=np.float64)
        table = {name: np.array([row[name] for row in self.rows], dtype=np.float64) for name in METRICS}
        totals = {name: int(table[name].sum()) for name in COUNT_METRICS}
        mean, weighted = {}, {}
        for name in REAL_METRICS:
            known = np.isfinite(table[name])
            values, sizes = table[name][known], numel[known]
            mean[name] = math.fsum(values) / len(values) if len(values) else math.nan
            weighted[name] = math.fsum(values * sizes) / math.fsum(sizes) if len(values) else math.nan
        pooled = Comparison(self.sums, self._wasserstein()).metrics()
        return [
            {"average": name, "numel": int(numel.sum())} | row | totals
            for name, row in zip(AVERAGES, (mean, weighted, pooled))
        ]

    def _wasserstein(self) -> float:
        """W1 of the pooled values; NaN where wider values were too many to keep."""
        if self.kept is None:
            return math.nan
        sides = [[h.distribution() for h in side.values()] for side in self.counted]
        if any(self.kept):
            wide = []
            for counts, arrays in zip(sides, self.kept):
                repeated = [np.repeat(v, c) for v, c in counts]
                dtype = np.result_type(np.float32, *arrays)
                wide.append(np.sort(np.concatenate([x.astype(dtype) for x in (*arrays, *repeated)] or [np.empty(0)])))
            return sorted_wasserstein(*wide) if all(len(x) for x in wide) else math.nan
        if not all(any(len(v) for v, _ in side) for side in sides):
            return math.nan
        (va, ca), (vb, cb) = ([np.concatenate(part) for part in zip(*side)] for side in sides)
        return counted_wasserstein(va, ca, vb, cb)
