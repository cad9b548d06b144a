"""The exact one-dimensional Wasserstein distance: by counting codes up to 16 bits, by sorting above.

Legend: n and m values on the two sides, F and G their cumulative distributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fa_study.distance.histogram import ValueHistogram, balance
from fa_study.distance.values import BLOCK, Flat


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
    scale = safe_scale(max(abs(float(x)) for x in (a[0], a[-1], b[0], b[-1])))
    terms = _paired_terms(a, b, scale) if n == m else merged_terms(a, b, scale)
    weight = n if n == m else n * m
    return math.fsum(terms) / weight / scale


def safe_scale(largest: float) -> float:
    """A factor under which sums of differences of values of this size cannot overflow float64."""
    return 2.0**-128 if largest > 2.0**850 else 1.0


def _paired_terms(a: np.ndarray, b: np.ndarray, scale: float) -> Iterator[float]:
    for start in range(0, len(a), BLOCK):
        x, y = (side[start : start + BLOCK].astype(np.float64) for side in (a, b))
        yield np.abs(x * scale - y * scale).sum() if scale != 1 else np.abs(np.subtract(x, y, out=x), out=x).sum()


def merged_terms(
    a: np.ndarray,
    b: np.ndarray,
    scale: float,
    *,
    sizes: tuple[int, int] | None = None,
    before: tuple[int, int] = (0, 0),
) -> Iterator[float]:
    """The integral of |F - G|, times n m, in pieces of at most BLOCK values of each side.

    Where the arrays are a part of the values, `sizes` are n and m and `before` counts the smaller values of each side.
    """
    n, m = sizes or (len(a), len(b))
    if a.dtype != b.dtype:
        a, b = a.astype(np.float64), b.astype(np.float64)
    cuts = np.unique(np.concatenate([a[::BLOCK], b[::BLOCK]]))
    starts_a, starts_b = (np.append(np.searchsorted(side, cuts), len(side)) for side in (a, b))
    for k in range(len(cuts)):
        x, y = a[starts_a[k] : starts_a[k + 1]], b[starts_b[k] : starts_b[k + 1]]
        values = np.concatenate([x, y]).astype(np.float64) * scale
        order = np.argsort(values, kind="stable")
        from_a = order < len(x)
        count_a = before[0] + starts_a[k] + np.cumsum(from_a)
        count_b = before[1] + starts_b[k] + np.cumsum(~from_a)
        # The last step of a piece leads to the first value of the next one, which is the next cut.
        end = [float(cuts[k + 1]) * scale] if k + 1 < len(cuts) else []
        steps = np.diff(values[order], append=end)
        gap = np.abs(balance(count_a, m, n) - balance(count_b, n, m))
        yield float(np.sum(gap[: len(steps)] * steps))
