"""W1 between all values of two series of tensors, without ever holding more than a slice of them.

Values are cut into slices by size, few enough to be held; the tensors are read again for each slice. Within a slice,
and from one slice to the next, the integral of |F - G| needs nothing but the counts of the smaller values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from fa_study.distance.values import Flat, blocks
from fa_study.distance.wasserstein import merged_terms, safe_scale, sorted_wasserstein

# Values of both sides together that a slice may hold, unless more of them are nearly the same: 128 MB in float32.
SLICE = 1 << 25
_Read = Callable[[], Iterable[Flat]]


def streamed_wasserstein(read_a: _Read, read_b: _Read) -> float:
    """Exact W1 between the finite values that two functions read, again and again, tensor by tensor.

    The memory is one tensor and one slice of values; NaN where a side has no finite value.
    """
    reads = read_a, read_b
    seen = [(x.native_type(), len(x)) for read in reads for x in read()]
    dtype = np.result_type(np.float32, *(kind for kind, _ in seen))
    if sum(size for _, size in seen) <= SLICE:
        x, y = (_between(read, dtype, -np.finfo(dtype).max, np.inf) for read in reads)
        return sorted_wasserstein(x, y) if len(x) and len(y) else math.nan
    edges = _edges(dtype)
    counts = [_bucket_counts(read, dtype, edges) for read in reads]
    n, m = (int(count.sum()) for count in counts)
    if not n or not m:
        return math.nan
    total = np.cumsum(counts[0] + counts[1])
    # A new slice begins at the bucket with which the one before would overflow.
    cuts, taken = [0], 0
    for i, upto in enumerate(total):
        if upto - taken > SLICE and i > cuts[-1]:
            cuts.append(i)
            taken = int(total[i - 1])
    scale = safe_scale(float(np.finfo(dtype).max) if _is_huge(counts, edges) else 1.0)
    terms, before, last = [], [0, 0], None
    for i, start in enumerate(cuts):
        stop = cuts[i + 1] if i + 1 < len(cuts) else len(edges) - 1
        x, y = (_between(read, dtype, edges[start], edges[stop]) for read in reads)
        if not len(x) and not len(y):
            continue
        first = min(float(side[0]) for side in (x, y) if len(side))
        if last is not None:
            gap = abs(before[0] * m - before[1] * n)  # Python's integers are exact
            terms.append(gap * (first * scale - last * scale))
        terms += merged_terms(x, y, scale, sizes=(n, m), before=tuple(before))
        last = max(float(side[-1]) for side in (x, y) if len(side))
        before = [before[0] + len(x), before[1] + len(y)]
    return math.fsum(terms) / n / m / scale


def _edges(dtype: np.dtype) -> np.ndarray:
    """Ascending finite floats that bound the buckets: all values that 16 leading bits can tell apart, and infinity."""
    code = np.dtype(f"u{dtype.itemsize}")
    values = (np.arange(1 << 16).astype(code) << code.type(8 * dtype.itemsize - 16)).view(dtype)
    # The lowest edge has to be the lowest number, whose bits after the 16 leading ones are not zero.
    finite = np.unique(values[np.isfinite(values)])
    return np.concatenate([[-np.finfo(dtype).max], finite[1:], [np.inf]]).astype(dtype)


def _bucket_counts(read: _Read, dtype: np.dtype, edges: np.ndarray) -> np.ndarray:
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    for flat in read():
        for block in blocks(flat, 1 << 20):
            values = np.sort(block.native().astype(dtype, copy=False))
            counts += np.diff(np.searchsorted(values, edges, "left"))
    return counts


def _between(read: _Read, dtype: np.dtype, low: float, high: float) -> np.ndarray:
    """The values with low <= x < high, ascending."""
    parts = [np.empty(0, dtype)]
    for flat in read():
        for block in blocks(flat, 1 << 20):
            values = block.native().astype(dtype, copy=False)
            parts.append(values[(values >= low) & (values < high)])
    values = np.concatenate(parts)
    values.sort()
    return values


def _is_huge(counts: list[np.ndarray], edges: np.ndarray) -> bool:
    """Whether a bucket with values reaches numbers whose sums could overflow float64."""
    used = (counts[0] + counts[1]) > 0
    return bool((np.abs(edges[:-1].astype(np.float64))[used] > 2.0**900).any())
