"""Sums over pairs of values, from which every elementwise metric of two tensors follows.

One pass over blocks that stay in cache; sums in float64 inside a block, exactly rounded (math.fsum) across blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fa_study.distance.values import BLOCK, Flat, blocks


@dataclass
class PairSums:
    """Means and norms over the pairs (a, b) whose values are both finite, d = a - b; they merge over tensors."""

    numel: int = 0
    pairs: int = 0  # both finite
    equal: int = 0  # same bits (same value where the dtypes differ), non-finite ones too
    max_d: float = 0.0
    max_ulp: float = math.nan
    mean_d: float = 0.0
    mean_abs_d: float = 0.0
    norm_a: float = 0.0
    norm_b: float = 0.0
    norm_d: float = 0.0
    cosine: float = math.nan  # of this tensor, or of what has been merged
    mean_a: float = 0.0
    mean_b: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def metrics(self) -> dict[str, float]:
        """The elementwise metrics; NaN where no pair is finite or a norm they divide by is zero."""
        return {
            "max_difference": self.max_d if self.pairs else math.nan,
            "mean_difference": self.mean_abs_d if self.pairs else math.nan,
            "signed_difference": self.mean_d if self.pairs else math.nan,
            "relative_l2": _ratio(self.norm_d, self.norm_a) if self.pairs else math.nan,
            "cosine": self.cosine,
            "max_ulp": self.max_ulp,
            "equal_fraction": self.equal / self.numel if self.numel else math.nan,
        }

    def sigma(self) -> float:
        """The root of the mean of the two variances."""
        if not self.pairs:
            return math.nan
        sides = []
        for norm, mean in ((self.norm_a, abs(self.mean_a)), (self.norm_b, abs(self.mean_b))):
            rms = norm / math.sqrt(self.pairs)
            sides.append(math.sqrt(max(0.0, rms - mean)) * math.sqrt(rms + mean))  # no square that could overflow
        return math.hypot(*sides) / math.sqrt(2)

    def merge(self, other: PairSums) -> PairSums:
        """The sums over both sets of pairs."""
        pairs = self.pairs + other.pairs
        share, rest = self.pairs / (pairs or 1), other.pairs / (pairs or 1)
        dot = _dot(self) + _dot(other)
        a, b = math.hypot(self.norm_a, other.norm_a), math.hypot(self.norm_b, other.norm_b)
        known = [u for u in (self.max_ulp, other.max_ulp) if not math.isnan(u)]
        return PairSums(
            self.numel + other.numel,
            pairs,
            self.equal + other.equal,
            max(self.max_d, other.max_d),
            max(known, default=math.nan),
            self.mean_d * share + other.mean_d * rest,
            self.mean_abs_d * share + other.mean_abs_d * rest,
            a,
            b,
            math.hypot(self.norm_d, other.norm_d),
            _ratio(_ratio(dot, a), b) if a and b else math.nan,
            self.mean_a * share + other.mean_a * rest,
            self.mean_b * share + other.mean_b * rest,
            {name: self.counts[name] + other.counts[name] for name in COUNTS},
        )


COUNTS = ("nan_a", "nan_b", "inf_a", "inf_b", "zero_a", "zero_b")


def _dot(sums: PairSums) -> float:
    return 0.0 if math.isnan(sums.cosine) else sums.cosine * sums.norm_a * sums.norm_b


def _ratio(x: float, y: float) -> float:
    if y == 0:
        return 0.0 if x == 0 else math.inf
    return x / y


def _exponents(a: Flat, b: Flat) -> tuple[int, int, int]:
    """Powers of two that bring a, b and a - b near 1, so that no square of a float64 underflows or overflows.

    The squares of narrower formats fit float64 as they are.
    """
    if max(a.codes.itemsize, b.codes.itemsize) < 8:
        return 0, 0, 0
    top = np.zeros(3)
    for x, y in zip(blocks(a), blocks(b)):
        x, y = x.float64(), y.float64()
        with np.errstate(invalid="ignore"):
            d = x / 2 - y / 2
        for i, values in enumerate((x, y, d)):
            top[i] = max(top[i], np.max(np.abs(values), where=np.isfinite(values), initial=0.0))
    exponents = [int(np.frexp(t)[1]) if t else 0 for t in top]
    # Only extreme ranges are scaled: elsewhere the scaling would be a second pass for nothing.
    return tuple(e if abs(e) > 400 else 0 for e in exponents)


def pair_sums(a: Flat, b: Flat, *, ulp: bool = True) -> PairSums:
    """Sum over all pairs of two tensors of the same size."""
    same_type = a.dtype == b.dtype
    e_a, e_b, e_d = _exponents(a, b)
    parts, equal, pairs, max_d, max_ulp = [], 0, 0, 0.0, 0
    work = np.empty((4, min(BLOCK, len(a))))
    with np.errstate(over="ignore", invalid="ignore"):
        for block_a, block_b in zip(blocks(a), blocks(b)):
            x, y = block_a.float64(work[2]), block_b.float64(work[3])
            same = block_a.codes == block_b.codes if same_type else x == y
            d = np.subtract(x, y, out=work[0, : len(x)])
            size = np.abs(d, out=work[1, : len(x)])
            total = size.sum()
            if not np.isfinite(total):
                keep = np.isfinite(x) & np.isfinite(y)
                x, y, d = x[keep], y[keep], d[keep]
                block_a, block_b = Flat(block_a.codes[keep], a.dtype), Flat(block_b.codes[keep], b.dtype)
                size = np.abs(d)
            n_same = int(np.count_nonzero(same))
            equal += n_same
            pairs += len(x)
            if not len(x):
                continue
            if n_same < len(same):
                max_d = max(max_d, float(size.max()))
                if same_type and ulp:
                    max_ulp = max(max_ulp, largest_step(block_a, block_b))
            if e_a or e_b or e_d:
                d = np.ldexp(x, -e_d) - np.ldexp(y, -e_d)
                x, y, size = np.ldexp(x, -e_a), np.ldexp(y, -e_b), np.abs(d)
            # einsum adds products in one pass, on one thread, whatever BLAS there is.
            parts.append(
                (
                    d.sum(),
                    size.sum(),
                    x.sum(),
                    y.sum(),
                    *(np.einsum("i,i->", u, v) for u, v in ((x, x), (y, y), (d, d), (x, y))),
                )
            )
        s_d, s_abs, s_a, s_b, aa, bb, dd, ab = (_fsum(column) for column in zip(*parts)) if parts else [0.0] * 8
        norm_a, norm_b = math.sqrt(aa), math.sqrt(bb)
        return PairSums(
            numel=len(a),
            pairs=pairs,
            equal=equal,
            max_d=max_d,
            max_ulp=float(max_ulp) if same_type and ulp and pairs else math.nan,
            mean_d=float(np.ldexp(s_d / (pairs or 1), e_d)),
            mean_abs_d=float(np.ldexp(s_abs / (pairs or 1), e_d)),
            norm_a=float(np.ldexp(norm_a, e_a)),
            norm_b=float(np.ldexp(norm_b, e_b)),
            norm_d=float(np.ldexp(math.sqrt(dd), e_d)),
            cosine=max(-1.0, min(1.0, ab / norm_a / norm_b)) if norm_a and norm_b else math.nan,
            mean_a=float(np.ldexp(s_a / (pairs or 1), e_a)),
            mean_b=float(np.ldexp(s_b / (pairs or 1), e_b)),
        )


def _fsum(column: tuple[float, ...]) -> float:
    try:
        return math.fsum(column)
    except (OverflowError, ValueError):  # infinities of an overflow: let them propagate instead
        return float(np.sum(column))


def largest_step(a: Flat, b: Flat) -> int:
    """The largest number of representable values between the two of a pair, of the same dtype."""
    x, y = a.order(), b.order()
    # A signed difference can wrap around; read as unsigned it is right.
    return int((np.maximum(x, y) - np.minimum(x, y)).view(a.codes.dtype).max(initial=0))
