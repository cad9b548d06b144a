"""Exponents of power laws, fitted seed by seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats


def log_slopes(frame: pd.DataFrame, x: str, y: str, by: Sequence[str], *, confidence: float = 0.95) -> pd.DataFrame:
    """The exponent of y ~ x^exponent: mean over the seeds of least-squares fits to the logarithms, with an interval.

    Points with y = 0 are left out; seeds with fewer than two points left as well.

    Parameters
    ----------
    frame : a row per seed, x and combination of `by`.

    Returns
    -------
    DataFrame : the columns of `by`, exponent, low and high (Student's t over the seeds), seeds.
    """
    rows = []
    for key, group in frame[frame[y] > 0].groupby(list(by), sort=False):
        parts = [part for _, part in group.groupby("seed") if part[x].nunique() > 1]
        # Relative to the first value: the exponent of a constant is 0, and not what rounding leaves of it.
        slopes = [np.polyfit(np.log(part[x]), np.log(part[y] / part[y].iloc[0]), 1)[0] for part in parts]
        if len(slopes) < 2:
            raise ValueError(f"{key}: an interval needs two seeds with two values of {x} each, got {len(slopes)}")
        mean, error = float(np.mean(slopes)), float(stats.sem(slopes))
        low, high = stats.t.interval(confidence, len(slopes) - 1, mean, error) if error > 0 else (mean, mean)
        rows.append(dict(zip(by, key)) | {"exponent": mean, "low": low, "high": high, "seeds": len(slopes)})
    return pd.DataFrame(rows)
