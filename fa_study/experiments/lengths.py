"""Figure 5: the deviation between Flash and Baseline as the sequence grows, at a fixed tile."""

from __future__ import annotations

from itertools import product

import pandas as pd

from fa_study.experiments.compare import ARMS, compare
from fa_study.experiments.sweep import Sweep

Bc = 64


def length_cell(*, distribution: str, N: int, family: str, format: str) -> pd.DataFrame:
    """One length: FlashAttention 1 where everything is rounded; elsewhere FlashAttention 2 and PyTorch's kernel."""
    uniform = family == "uniform"
    frame = compare(
        distribution=distribution,
        N=N,
        format=format,
        family=family,
        tiles=(Bc,),
        algorithms=("fa1",) if uniform else ("fa2",),
        kernel=not uniform,
        rows=64,
        extended=False,
    )
    # The figure is about the distance between the two, and against an FP64 golden value an FP64 error means nothing.
    return frame if format != "fp64" else frame[frame["against"] == "Baseline"]


LENGTHS = Sweep(
    length_cell,
    [
        {"distribution": d, "N": N, "family": y, "format": f}
        for d, (y, f), N in product(("normal", "uniform", "outliers"), ARMS, (2**i for i in range(7, 15)))
        if d != "outliers" or f == "bf16"
    ],
)
