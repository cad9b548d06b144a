"""The verdict on the question whether Flash's drift is more than what training makes of any difference."""

from __future__ import annotations

import pandas as pd

from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Verdict


def explained_verdict(beside: pd.DataFrame) -> Verdict:
    """Does a nudge of one unit in the last place explain the drift of Flash?

    It does where Flash's distance grows at the twins' rate (the 95 % interval of the ratio over seeds holds 1) and ends
    no further away (that of the ratio over the last quarter reaches down to 1), in weights and in predictions of each
    precision.

    Parameters
    ----------
    beside : `experiments.amplification.flash_beside_twins`.
    """
    growth = beside[beside["what"] == "growth"]
    ends = beside[beside["what"] == "distance at the end"]
    same = (growth["low"] <= 1) & (growth["high"] >= 1)
    no_further = ends["low"] <= 1
    words = [
        f"{row.space} in {row.precision.upper()} {1 / row.centre:.0%} ({1 / row.high:.0%} to {1 / row.low:.0%}, "
        f"{row.seeds} seeds; an excess of Flash by {row.detectable - 1:.0%} would have been seen in 4 cases of 5)"
        for row in ends.itertuples()
    ]
    text = (
        "In the last quarter of the training, a run with Baseline that was nudged shows of Flash's distance: "
        f"{'; '.join(words)}. Before, the factor by which Flash's distance grows in 100 steps is "
        f"{growth['centre'].min():.2f} to {growth['centre'].max():.2f} times the twins', and not told from theirs in "
        f"{same.sum()} of {len(growth)} cases."
    )
    part, whole = int(same.sum() + no_further.sum()), len(growth) + len(ends)
    return Verdict("'one unit in the last place explains the drift'", answer(part, whole), text)
