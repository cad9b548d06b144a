"""Figures 3 and 4: the deviation by number format, between Flash and Baseline and of each from the golden value."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pandas as pd

from fa_study.experiments.compare import FAMILIES, compare
from fa_study.experiments.inputs import DISTRIBUTIONS
from fa_study.experiments.sweep import Sweep
from fa_study.formats import parse_format

# Read off the paper's Figure 3. All four are powers of two.
PAPER_FIGURE_3 = {"bf16": 2.0**-7, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}
NAMED = ("bf16", "fp16", "tf32", "fp32", "fp64")
WIDTHS = tuple(f"e11m{bits}" for bits in range(2, 25))

_NAMED_CELLS = [
    {"distribution": d, "N": 1024, "format": f, "family": y} for d, y, f in product(DISTRIBUTIONS, FAMILIES, NAMED)
]
_WIDTH_CELLS = [
    {"distribution": d, "N": 1024, "format": f, "family": "uniform"} for d, f in product(("normal", "uniform"), WIDTHS)
]
FORMATS = Sweep(
    partial(compare, algorithms=("fa1", "fa2"), references=("rounded", "original"), rows=64),
    _NAMED_CELLS + _WIDTH_CELLS,
)


def width_slopes(frame: pd.DataFrame) -> pd.DataFrame:
    """Slope of log2(max difference) over the fraction bits, per distribution and seed, from the e11m2 to e11m24 rows.

    -1 means that each further bit halves the deviation.
    """
    shown = frame[frame["format"].isin(WIDTHS)].assign(bits=lambda f: [parse_format(x).mantissa_bits for x in f.format])
    rows = [
        {"distribution": d, "seed": s, "slope": np.polyfit(g["bits"], np.log2(g["max"]), 1)[0]}
        for (d, s), g in shown.groupby(["distribution", "seed"])
    ]
    return pd.DataFrame(rows)


def paper_matches(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of the seeds whose max difference from Baseline is just the paper's number, per setting.

    Parameters
    ----------
    frame : rows of Flash against Baseline in the paper's four formats.

    Returns
    -------
    DataFrame : distribution, N, a column per format with the share, and all, the product of the four.
    """
    shown = frame[frame["format"].isin(list(PAPER_FIGURE_3))]
    target = shown["format"].map(PAPER_FIGURE_3)
    shown = shown.assign(match=np.isclose(shown["max"], target, rtol=0.02, atol=0))
    table = shown.pivot_table(index=["distribution", "N"], columns="format", values="match", aggfunc="mean")
    return table[list(PAPER_FIGURE_3)].assign(all=table.prod(axis=1)).reset_index()
