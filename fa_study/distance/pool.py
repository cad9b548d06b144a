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
from collections.abc import Callable

import numpy as np
import torch

from fa_study.distance.elementwise import PairSums
from fa_study.distance.histogram import ValueHistogram, counted_wasserstein
from fa_study.distance.metrics import COUNT_METRICS, METRICS, REAL_METRICS, Comparison
from fa_study.distance.streamed import streamed_wasserstein
from fa_study.distance.values import Flat

AVERAGES = ("mean", "weighted", "pooled")


class Pool:
    """Collects compared tensors: their rows, their sums, the counts of narrow values, the names of all."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.sums = PairSums()
        self.counted: tuple[dict[torch.dtype, ValueHistogram], ...] = ({}, {})
        self.all_counted = True

    def add(self, comparison: Comparison, row: dict[str, float]) -> None:
        self.rows.append(row)
        self.sums = self.sums.merge(comparison.sums)
        if comparison.histograms is None:
            self.all_counted = False
            return
        for pooled, histogram in zip(self.counted, comparison.histograms):
            pooled.setdefault(histogram.dtype, ValueHistogram(histogram.dtype)).merge(histogram)

    def aggregates(self, read: Callable[[str, int], Flat]) -> list[dict]:
        """The three rows; none where nothing was added. `read` gives a tensor by its name and side, 0 or 1."""
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
            weighted[name] = math.fsum(values * (sizes / sizes.sum())) if len(values) else math.nan
        pooled = Comparison(self.sums, self._wasserstein(read)).metrics()
        return [
            {"average": name, "numel": int(numel.sum())} | row | totals
            for name, row in zip(AVERAGES, (mean, weighted, pooled))
        ]

    def _wasserstein(self, read: Callable[[str, int], Flat]) -> float:
        """W1 of the pooled values: from the counts if all were counted, else by reading the tensors again."""
        if len(self.rows) == 1:
            return self.rows[0]["wasserstein"]
        if not self.all_counted:
            names = [row["name"] for row in self.rows]
            return streamed_wasserstein(*(lambda side=side: (read(name, side) for name in names) for side in (0, 1)))
        sides = [[h.distribution() for h in side.values()] for side in self.counted]
        if not all(any(len(v) for v, _ in side) for side in sides):
            return math.nan
        (va, ca), (vb, cb) = ([np.concatenate(part) for part in zip(*side)] for side in sides)
        return counted_wasserstein(va, ca, vb, cb)
