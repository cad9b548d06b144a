"""The verdict on each claim of the paper, computed from the tables and put into one sentence of Markdown.

Each function takes a figure's table and returns a `Verdict`, whose text a page shows and whose `holds` a test checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pandas as pd

from fa_study.experiments.weights import drift_trend

Holds = Literal["holds", "holds only where", "does not hold"]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: whether it holds, and the sentence that says so with its numbers."""

    claim: str
    holds: Holds
    text: str

    def _repr_markdown_(self) -> str:
        return f"**Our verdict on {self.claim}: {self.holds}.** {self.text}"


def drift_verdict(model: pd.DataFrame, *, level: float = 0.01) -> Verdict:
    """C7: does the distance between Flash-trained and Baseline-trained weights only grow with training?

    It counts as growing in a pair of runs if Kendall's rank correlation with the step is positive at `level`, in Max
    Difference and in Wasserstein distance; the claim holds if that is so in every pair.

    Parameters
    ----------
    model : rows of Figure 7's table for one aggregate of the whole model.
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
