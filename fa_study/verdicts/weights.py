"""The verdicts on Figures 7 and 8: what happens to the weights."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.weights import drift_trend
from fa_study.verdicts.verdict import Holds, Verdict


def drift_verdict(model: pd.DataFrame, *, level: float = 0.01) -> Verdict:
    """C7: does the distance between Flash-trained and Baseline-trained weights only grow with training?

    It counts as growing in a pair of runs if Kendall's rank correlation with the step is positive at `level`, in Max
    Difference and in Wasserstein distance; the claim holds if that is so in every pair.

    Parameters
    ----------
    model : rows of Figure 7's table for one average over the whole model.
    """
    trends = pd.concat(drift_trend(model, metric) for metric in ("max_difference", "wasserstein"))
    grows = trends["p"] < level
    falls, increments = int(trends["falls"].sum()), int(trends["increments"].sum())
    pairs = model.groupby(["precision", "seed"]).ngroups
    holds: Holds = "holds" if grows.all() else "holds only where" if grows.any() else "does not hold"
    failing = trends[~grows].groupby("precision")["seed"].nunique()
    exceptions = ", ".join(f"{count} in {precision.upper()}" for precision, count in failing.items())
    text = (
        f"In {pairs} pairs of runs the weights drift apart with a rising trend"
        + (f", but for {exceptions} the trend is not established at {level:g}" if exceptions else "")
        + f"; from one snapshot to the next the distance fell in {falls} of {increments} intervals."
    )
    return Verdict("C7", holds, text)
