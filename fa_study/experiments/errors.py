"""The numbers by which one output is held against another, per seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

STATISTICS = ["max", "rms", "mean", "mean_abs", "std_abs"]


def difference(a: Tensor, b: Tensor | np.ndarray) -> Tensor:
    """a - b in float64; b may be in extended precision, where FP64 results are judged."""
    if isinstance(b, np.ndarray):
        return torch.from_numpy((a.double().numpy() - b).astype(np.float64))
    return a.double() - b.double()


def error_rows(d: Tensor, seeds: Sequence[int], **labels: object) -> pd.DataFrame:
    """A row per seed about the difference d (B, ...), whose first dimension is the seed.

    Returns
    -------
    DataFrame : seed, the labels, and max |d|, the root of the mean of d^2, the signed mean of d, mean |d| and the
        standard deviation of |d|, in the unit of the outputs.
    """
    flat = d.double().flatten(1)
    size = flat.abs()
    return pd.DataFrame(
        {
            "seed": list(seeds),
            **labels,
            "max": size.amax(1),
            "rms": flat.square().mean(1).sqrt(),
            "mean": flat.mean(1),
            "mean_abs": size.mean(1),
            "std_abs": size.std(1),
        }
    )
