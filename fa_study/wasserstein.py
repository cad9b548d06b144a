"""The exact one-dimensional Wasserstein distance: by counting codes up to 16 bits, by sorting above.

Legend: n and m values on the two sides, F and G their cumulative distributions.
"""

from __future__ import annotations

import math

import numpy as np

from fa_study.histogram import ValueHistogram, balance
from fa_study.values import BLOCK, Flat


def finite_sorted(flat: Flat, *, overwrite: bool = False) -> np.ndarray:
    """The finite values, ascending, in the float type that holds them exactly; a copy, unless `overwrite`."""
    if flat.is_narrow:
        values, counts = ValueHistogram.of(flat).distribution()
        return np.repeat(values.astype(np.float32), counts)
    values = flat.native()
    if overwrite and values.flags.writeable:
        values.sort()
    else:
        values = np.sort(values)
    # A sort puts -inf first, inf and then NaN last, so the finite values are one slice of it.
    limit = np.finfo(values.dtype).max
    return values[np.searchsorted(values, -limit, "left") : np.searchsorted(values, limit, "right")]


def sorted_wasserstein(a: np.ndarray, b: np.ndarray) -> float:
    """W1 of two ascending arrays of finite floats.

    Equal sizes: mean |a_i - b_i|. Unequal sizes: the integral of |F - G|, from integer counts.
    """
    n, m = len(a), len(b)
    if n == 0 or m == 0:
        raise ValueError("the Wasserstein distance needs at least one finite value on each side")
    largest = max(abs(float(x)) for x in (a[0], a[-1], b[0], b[-1]))
    scale = 2.0**-64 if largest > 2.0**950 else 1.0  # the sum of float64 differences must not overflow
    terms = _paired_terms(a, b, scale) if n == m else _merged_terms(a, b, scale)
    weight = n if n == m else n * m
    return math.fsum(terms) / weight / scale


def _paired_terms(a: np.ndarray, b: np.ndarray, scale: float):
    for start in range(0, len(a), BLOCK):
        x, y = (side[start : start + BLOCK].astype(np.float64) for side in (a, b))
        yield np.abs(x * scale - y * scale).sum() if scale != 1 else np.abs(np.subtract(x, y, out=x), out=x).sum()


def _merged_terms(a: np.ndarray, b: np.ndarray, scale: float):
    """The integral of |F - G|, times n m, in pieces of at most BLOCK values of each side."""
    n, m = len(a), len(b)
    if a.dtype != b.dtype:
        a, b = a.astype(np.float64), b.astype(np.float64)
    cuts = np.unique(np.concatenate([a[::BLOCK], b[::BLOCK]]))
    starts_a, starts_b = (np.append(np.searchsorted(side, cuts), len(side)) for side in (a, b))
    for k in range(len(cuts)):
        x, y = a[starts_a[k] : starts_a[k + 1]], b[starts_b[k] : starts_b[k + 1]]
        values = np.concatenate([x, y]).astype(np.float64) * scale
        order = np.argsort(values, kind="stable")
        from_a = order < len(x)
        count_a = starts_a[k] + np.cumsum(from_a)
        count_b = starts_b[k] + np.cumsum(~from_a)
        # The last step of a piece leads to the first value of the next one, which is the next cut.
        end = [float(cuts[k + 1]) * scale] if k + 1 < len(cuts) else []
        steps = np.diff(values[order], append=end)
        gap = np.abs(balance(count_a, m, n) - balance(count_b, n, m))
        yield float(np.sum(gap[: len(steps)] * steps))
