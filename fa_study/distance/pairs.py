"""The distances between two tensors: elementwise, and between the distributions of their values."""

from __future__ import annotations

import warnings

import numpy as np

from fa_study.distance.histogram import ValueHistogram
from fa_study.distance.metrics import compare
from fa_study.distance.values import Flat, blocks, flatten
from fa_study.distance.wasserstein import finite_sorted, sorted_wasserstein


def max_difference(a, b) -> float:
    """The largest difference of a pair of values, max |a_i - b_i|.

    Parameters
    ----------
    a, b
        Tensors or arrays of the same shape, of any float, integer or boolean dtype, not empty.

    Returns
    -------
    float
        In the units of the values. Pairs with a NaN or an infinity are left out, with a RuntimeWarning that counts
        them; `tensor_distance` returns the counts.

    Raises
    ------
    ValueError
        The shapes differ, the tensors are empty, or no pair is finite.
    """
    flat_a, flat_b = _pair(a, b)
    if flat_a.dtype == flat_b.dtype and not flat_a.is_float:
        return compare(flat_a, flat_b).sums.max_d
    largest, pairs = 0.0, 0
    with np.errstate(over="ignore", invalid="ignore"):
        for block_a, block_b in zip(blocks(flat_a), blocks(flat_b)):
            x, y = block_a.float64(), block_b.float64()
            size = np.abs(x - y)
            top = size.max()
            if not np.isfinite(top):
                size = size[np.isfinite(x) & np.isfinite(y)]
                top = size.max(initial=0.0)
            pairs += len(size)
            largest = max(largest, float(top))
    _report(len(flat_a) - pairs, len(flat_a), "pairs")
    return largest


def wasserstein_distance(a, b) -> float:
    """The exact 1-D Wasserstein distance W1 between the values of two tensors.

    W1 = integral of |F(x) - G(x)| dx, with F and G the cumulative distributions of the values of a and of b. For equal
    sizes that is mean |sort(a) - sort(b)|, for unequal sizes a sum over the merged values with integer counts.

    Parameters
    ----------
    a, b
        Tensors or arrays of any shapes (flattened) and sizes, of any float dtype, not empty.

    Returns
    -------
    float
        W1, not a power of it, in the units of the values; equal to `scipy.stats.wasserstein_distance` on float64
        copies. Values that are not finite are left out, with a RuntimeWarning that counts them.

    Raises
    ------
    ValueError
        A side has no finite value.

    Notes
    -----
    Values of at most 16 bits are counted (`ValueHistogram`), wider ones sorted.
    """
    flats = []
    for x in (a, b):
        flat = flatten(x)
        # Integers go in as float64; only floats have the codes that are counted.
        flats.append(flat if flat.is_float else flatten(flat.float64()))
        if not len(flat):
            raise ValueError("nothing to compare: an empty tensor has no Wasserstein distance")
    flat_a, flat_b = flats
    if flat_a.is_narrow and flat_b.is_narrow:
        histograms = ValueHistogram.of(flat_a), ValueHistogram.of(flat_b)
        _report(sum(len(f) - h.finite for f, h in zip(flats, histograms)), len(flat_a) + len(flat_b), "values")
        return histograms[0].wasserstein(histograms[1])
    x, y = finite_sorted(flat_a), finite_sorted(flat_b)
    _report(len(flat_a) + len(flat_b) - len(x) - len(y), len(flat_a) + len(flat_b), "values")
    return sorted_wasserstein(x, y)


def tensor_distance(a, b) -> dict[str, float]:
    """Every metric of one pair of tensors; `fa_study.distance.metrics` lists them with their formulas.

    Parameters
    ----------
    a, b
        Tensors or arrays of the same shape, not empty. Integers and booleans are compared exactly and get
        max_difference and equal_fraction only, the others being NaN.

    Returns
    -------
    dict
        numel and one entry per name in `METRICS`. Non-finite values are left out of the metrics and counted.

    Raises
    ------
    ValueError
        The shapes differ or the tensors are empty.
    """
    flat_a, flat_b = _pair(a, b)
    return {"numel": len(flat_a)} | compare(flat_a, flat_b).metrics()


def value_quantiles(x, q) -> float | np.ndarray:
    """Exact quantiles of a tensor's finite values, as `numpy.quantile` defines them, for any float dtype and size."""
    flat = flatten(x)
    if flat.is_narrow:
        return ValueHistogram.of(flat).quantile(q)
    values = finite_sorted(flat)
    if not len(values):
        raise ValueError("no finite value to take a quantile of")
    position = np.asarray(q, dtype=np.float64) * (len(values) - 1)
    if not np.all((position >= 0) & (position <= len(values) - 1)):
        raise ValueError(f"quantiles lie between 0 and 1, got {q}")
    low, high = (values[edge(position).astype(np.intp)].astype(np.float64) for edge in (np.floor, np.ceil))
    result = low + (high - low) * (position - np.floor(position))
    return float(result) if np.ndim(result) == 0 else result


def _pair(a, b) -> tuple[Flat, Flat]:
    shape_a, shape_b = (tuple(getattr(x, "shape", np.shape(x))) for x in (a, b))
    if shape_a != shape_b:
        raise ValueError(f"elementwise metrics need equal shapes, got {shape_a} and {shape_b}")
    flat_a, flat_b = flatten(a), flatten(b)
    if not len(flat_a):
        raise ValueError(f"nothing to compare: the tensors of shape {shape_a} are empty")
    return flat_a, flat_b


def _report(left_out: int, total: int, what: str) -> None:
    if left_out == total:
        raise ValueError(f"nothing to compare: none of the {total} {what} is finite")
    if left_out:
        warnings.warn(f"{left_out} of {total} {what} are not finite and were left out", RuntimeWarning, stacklevel=3)
