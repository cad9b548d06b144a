"""Exact counts of narrow floats: 65,536 codes need no sort, and counts of shards simply add up."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from fa_study.distance.values import Flat, blocks, flatten

# np.bincount wants 64-bit integers: converting a block that stays in cache is twice as fast as letting it convert all.
_COUNT_BLOCK = 1 << 17


@cache
def _code_values(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(values, order): the value of every code, and the finite codes from the smallest to the largest value."""
    bits = 8 * dtype.itemsize
    codes = np.arange(1 << bits, dtype=np.uint8 if bits == 8 else np.uint16)
    values = Flat(codes, dtype).float64()
    finite = np.flatnonzero(np.isfinite(values))
    return values, finite[np.argsort(values[finite], kind="stable")]


@cache
def _special_codes(dtype: torch.dtype) -> tuple[np.ndarray, ...]:
    """The codes of NaN, of infinities and of zeros."""
    values = _code_values(dtype)[0]
    return tuple(np.flatnonzero(which) for which in (np.isnan(values), np.isinf(values), values == 0))


class ValueHistogram:
    """How often each value of a float format of at most 16 bits occurs.

    Exact, of a fixed size (65,536 counts, or 256 for FP8), and mergeable: the histogram of a whole tensor is the sum of
    the histograms of its shards, whichever process counted them, in any order.

    Parameters
    ----------
    dtype
        torch.bfloat16, torch.float16 or one of torch's 8-bit floats.

    Examples
    --------
    >>> histogram = ValueHistogram(torch.bfloat16)
    >>> for shard in shards: histogram.add(shard)
    """

    def __init__(self, dtype: torch.dtype):
        if not dtype.is_floating_point or dtype.itemsize > 2:
            raise ValueError(f"ValueHistogram counts floats of at most 16 bits, got {dtype}; sort wider values instead")
        self.dtype = dtype
        self.counts = np.zeros(1 << (8 * dtype.itemsize), dtype=np.int64)

    @classmethod
    def of(cls, x: object) -> ValueHistogram:
        """The histogram of one tensor or array."""
        flat = x if isinstance(x, Flat) else flatten(x)
        return cls(flat.dtype).add(flat)

    def add(self, x: object) -> ValueHistogram:
        """Count the values of `x`, whose dtype must be the histogram's; returns the histogram."""
        flat = x if isinstance(x, Flat) else flatten(x)
        if flat.dtype != self.dtype:
            raise ValueError(f"the histogram counts {self.dtype}, got {flat.dtype}; use one histogram per dtype")
        wide = np.empty(min(len(flat), _COUNT_BLOCK), dtype=np.intp)
        for block in blocks(flat, _COUNT_BLOCK):
            part = wide[: len(block)]
            part[:] = block.codes
            self.counts += np.bincount(part, minlength=len(self.counts))
        return self

    def merge(self, other: ValueHistogram) -> ValueHistogram:
        """Add the counts of another histogram of the same dtype to this one; returns this one."""
        if other.dtype != self.dtype:
            raise ValueError(f"cannot merge counts of {other.dtype} into counts of {self.dtype}")
        self.counts += other.counts
        return self

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def finite(self) -> int:
        """The number of finite values."""
        return len(self) - self.nan - self.inf

    @property
    def nan(self) -> int:
        return int(self.counts[_special_codes(self.dtype)[0]].sum())

    @property
    def inf(self) -> int:
        return int(self.counts[_special_codes(self.dtype)[1]].sum())

    @property
    def zero(self) -> int:
        return int(self.counts[_special_codes(self.dtype)[2]].sum())

    def distribution(self) -> tuple[np.ndarray, np.ndarray]:
        """(values, counts) of the finite values that occur, ascending; -0 and +0 are two entries of value 0."""
        values, order = _code_values(self.dtype)
        counts = self.counts[order]
        present = np.flatnonzero(counts)
        return values[order[present]], counts[present]

    def quantile(self, q: float | np.ndarray) -> float | np.ndarray:
        """Exact quantiles of the finite values, linear between neighbours as in `numpy.quantile`; 0 <= q <= 1."""
        q = np.asarray(q, dtype=np.float64)
        if not np.all((q >= 0) & (q <= 1)):
            raise ValueError(f"quantiles lie between 0 and 1, got {q}")
        values, counts = self.distribution()
        if not len(values):
            raise ValueError("no finite value to take a quantile of")
        last = np.cumsum(counts)
        position = q * (last[-1] - 1)
        below = values[np.searchsorted(last, np.floor(position), side="right")]
        above = values[np.searchsorted(last, np.ceil(position), side="right")]
        result = below + (above - below) * (position - np.floor(position))
        return float(result) if result.ndim == 0 else result

    def wasserstein(self, other: ValueHistogram) -> float:
        """Exact W1 between the finite values of two histograms, of any two dtypes; see `wasserstein_distance`."""
        return counted_wasserstein(*self.distribution(), *other.distribution())


def counted_wasserstein(
    values_a: np.ndarray, counts_a: np.ndarray, values_b: np.ndarray, counts_b: np.ndarray
) -> float:
    """W1 of two distributions given as ascending float64 values and integer counts.

    W1 = sum over neighbouring values x < y of the merged values of |n_b C_a(x) - n_a C_b(x)| (y - x) / (n_a n_b), where
    C(x) counts the values up to x. The counts stay integers until they are multiplied by the step.
    """
    n_a, n_b = int(counts_a.sum()), int(counts_b.sum())
    if n_a == 0 or n_b == 0:
        raise ValueError("the Wasserstein distance needs at least one finite value on each side")
    values = np.concatenate([values_a, values_b])
    order = np.argsort(values, kind="stable")
    signed = np.concatenate([balance(counts_a, n_b, n_a), -balance(counts_b, n_a, n_b)])
    steps = np.diff(values[order])
    return float(np.sum(np.abs(np.cumsum(signed[order])[:-1]) * steps) / n_a / n_b)


def balance(counts: np.ndarray | int, factor: int, size: int) -> np.ndarray:
    """counts * factor as integers, or as floats where factor * size could overflow 64 bits."""
    exact = factor * size < 1 << 62
    return np.asarray(counts) * factor if exact else np.asarray(counts, dtype=np.float64) * float(factor)
