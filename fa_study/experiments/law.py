"""How the error of Flash grows with the number of key tiles T = N / Bc, for three ways of rounding.

The law: if the errors of single roundings have mean zero, the relative error of a sum kept in a format of unit roundoff
u grows like sqrt(T) u; if they lean to one side, like T u (Higham and Mary).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import flash_attention, golden_attention
from fa_study.experiments.compare import ROWS, SEEDS, rms_per_seed
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.inputs import draw
from fa_study.experiments.slopes import log_slopes
from fa_study.experiments.sweep import Sweep
from fa_study.formats import BF16, round_to
from fa_study.rounding import RoundingPolicy

# rounding -> how a reader knows it
MODES = {"nearest_even": "to nearest", "stochastic": "stochastic", "toward_zero": "toward zero"}
_SIZES = [("Bc", 4096, 4096 // T) for T in (2, 4, 8, 16, 32, 64, 128, 256)]
_SIZES += [("N", 16 * T, 16) for T in (4, 8, 16, 32, 64, 128, 256, 512)]

_ARMS = (("fa1", "uniform"), ("fa1", "normal"), ("fa2", "uniform"))


@lru_cache(maxsize=1)
def _inputs(distribution: str, N: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V in BF16 and the golden output; kept, because many cells in a row share them."""
    q, k, v = (round_to(x, BF16) for x in draw(distribution, SEEDS, L=ROWS, S=N, D=64))
    return q, k, v, golden_attention(q, k, v).out


def law_cell(*, varied: str, distribution: str, N: int, Bc: int, rounding: str, algorithm: str) -> pd.DataFrame:
    """The error with every site in BF16, rounded in one way; `unit` is u times the RMS of the true output."""
    q, k, v, golden = _inputs(distribution, N)
    result = flash_attention(
        q,
        k,
        v,
        policy=RoundingPolicy.uniform(f"bf16:{rounding}"),
        tile=(ROWS, Bc),
        algorithm=algorithm,
        generator=torch.Generator().manual_seed(N + Bc),
    )
    unit = [BF16.unit_roundoff * rms for rms in rms_per_seed(golden)]
    return error_rows(difference(result.out, golden), SEEDS, T=N // Bc, unit=unit)


LAW = Sweep(
    law_cell,
    [
        {"varied": varied, "distribution": d, "N": N, "Bc": Bc, "rounding": mode, "algorithm": a}
        for (a, d), mode, (varied, N, Bc) in product(_ARMS, MODES, _SIZES)
        if varied == "Bc" or (a, d) == _ARMS[0]
    ],
)

# Means over the fraction of a number whose logarithm is uniformly distributed: of 1 / m and of 1 / m^2 for 1 <= m < 2.
_MEAN_INVERSE = 1 / (2 * math.log(2))
_MEAN_INVERSE_SQUARE = 3 / (8 * math.log(2))


def prediction(T: np.ndarray, rounding: str) -> np.ndarray:
    """Relative error of FlashAttention 1 in units of u on equal weights and values near a constant; nothing is fitted.

    A rounding's relative error has the mean square 4/12 E[1/m^2] u^2 to nearest and 4/6 E[1/m^2] u^2 stochastically,
    and the mean E[1/m] u toward zero, with m the number's fraction. What is rounded at tile i counts i / T in the end.
    O is rounded three times a tile and l once: 3 T / 3 + T / 3 variances, and 3 T / 2 - T / 2 means.
    """
    T = np.asarray(T, dtype=float)
    if rounding == "toward_zero":
        return T * _MEAN_INVERSE
    if rounding not in MODES:
        raise ValueError(f"rounding={rounding!r} is unknown: use one of {', '.join(MODES)}")
    variance = _MEAN_INVERSE_SQUARE * (4 / 12 if rounding == "nearest_even" else 4 / 6)
    return np.sqrt(4 / 3 * T * variance)


def fitted_exponents(frame: pd.DataFrame, *, T_from: int, T_to: int) -> pd.DataFrame:
    """Exponent of error ~ T^exponent between two T, with its 95 % interval, per setting."""
    shown = frame[frame["T"].between(T_from, T_to)]
    shown = shown.assign(error=shown["rms"] / shown["unit"])
    return log_slopes(shown, "T", "error", ["algorithm", "distribution", "varied", "rounding"])


def bias_share(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of the mean squared error that is the squared signed mean, per setting and T: median of the seeds."""
    share = (frame["mean"] / frame["rms"]) ** 2
    by = ["algorithm", "distribution", "varied", "rounding", "T"]
    return frame.assign(share=share).groupby(by)["share"].median().reset_index()
