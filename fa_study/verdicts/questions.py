"""Answers to the questions that the paper leaves open: how the error grows, and which rounding is to blame."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fa_study.experiments.law import MODES, bias_share, fitted_exponents, prediction
from fa_study.formats import BF16
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Verdict


def law_verdict(frame: pd.DataFrame, *, tolerance: float = 0.25, few: int = 16) -> Verdict:
    """Does the error of FlashAttention 1 follow the prediction that has no fitted constant?

    It does at a T if the median over the seeds lies within `tolerance` of the prediction. Asked for is 4 <= T < 1 / u:
    with fewer tiles the roundings outside the sums weigh as much, with more a tile is too small to be added at all. To
    nearest, bias may take over at large T; the T from which it makes up more than half of the squared error is told.

    Parameters
    ----------
    frame : rows of the law's table for FlashAttention 1 on uniform inputs.
    few : exponents are fitted up to this T and from it on.
    """
    frame = frame[frame["T"].between(4, 1 / BF16.unit_roundoff, inclusive="left")]
    medians = frame.assign(error=frame["rms"] / frame["unit"]).groupby(["rounding", "varied", "T"])["error"].median()
    medians = medians.reset_index()
    predicted = np.concatenate([prediction([row.T], row.rounding) for row in medians.itertuples(index=False)])
    close = (medians["error"] / predicted).between(1 / (1 + tolerance), 1 + tolerance)
    per_mode = close.groupby(medians["rounding"]).agg(["sum", "count"])

    biased = bias_share(frame)
    biased = biased[(biased["rounding"] == "nearest_even") & (biased["share"] > 0.5)]
    onset = f"from T = {biased['T'].min()} on" if len(biased) else f"nowhere up to T = {frame['T'].max()}"
    exponents = {
        words: fitted_exponents(frame, T_from=a, T_to=b).groupby("rounding")["exponent"].mean()
        for words, a, b in ((f"up to T = {few}", 1, few), ("beyond", few, int(frame["T"].max())))
    }
    nearest = ", ".join(f"{e['nearest_even']:.2f} {words}" for words, e in exponents.items())
    text = (
        f"From 4 tiles to {frame['T'].max()}, the error lies within {tolerance:.0%} of the prediction in "
        + ", ".join(f"{r['sum']} of {r['count']} cases {MODES[mode]}" for mode, r in per_mode.iterrows())
        + f". To nearest, the exponent of T is {nearest}, and bias makes up over half of the squared error {onset}."
    )
    return Verdict("the law", answer(close.sum(), len(close)), text)


def blame_verdict(shapley: pd.DataFrame) -> Verdict:
    """Is the rescaling to blame, as the paper says? Only where its site has the largest Shapley value.

    Parameters
    ----------
    shapley : `experiments.attribution.shapley_table`.
    """
    flash = shapley[shapley["algorithm"] != "Baseline"]
    shares = flash.groupby(["distribution", "algorithm", "site"])["share"].median().unstack("site")
    largest = shares.idxmax(axis=1)
    words = "; ".join(
        f"{algorithm} on {distribution} inputs: {site} {shares.loc[(distribution, algorithm), site]:.0%}, rescale "
        f"{shares.loc[(distribution, algorithm), 'rescale']:.1%}"
        for (distribution, algorithm), site in largest.items()
    )
    text = f"The largest share of the squared error, and that of the rescaling factor: {words}."
    return Verdict("'the rescaling is to blame'", answer((largest == "rescale").sum(), len(largest)), text)


def rescaling_verdict(shares: pd.DataFrame) -> Verdict:
    """Does Flash's extra error come from rescaling? Where less than half of it is left when nothing is rescaled.

    Parameters
    ----------
    shares : `experiments.control.rescaling_share`.
    """
    left = shares.groupby(["algorithm", "distribution", "format", "N", "Bc"])["share"].median()
    by = left.groupby("algorithm").agg(["min", "median", "max"])
    text = (
        "What an algorithm without rescaling, that keeps its sums in the tested format from tile to tile, already has "
        "of the squared error that Flash adds to Baseline's: "
        + "; ".join(f"{a}: {r['median']:.0%} (from {r['min']:.0%} to {r['max']:.0%})" for a, r in by.iterrows())
        + "."
    )
    return Verdict("'it is the rescaling'", answer((left < 0.5).sum(), len(left)), text)
