"""The verdict on the question whether it matters for the trained model which attention it was trained with."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.amplification import FLASH
from fa_study.experiments.matter import BARRIER, OTHER, barriers, loss_ratios
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Verdict


def matter_verdict(losses: pd.DataFrame, lines: pd.DataFrame) -> Verdict:
    """Does training with Flash give another model than training with Baseline?

    It matters in a precision if the 95 % interval over seeds of the ratio of held-out losses leaves 1 out; and in a
    pair of runs if the loss on the line between them rises by `BARRIER` or more.

    Parameters
    ----------
    losses, lines : the study's tables.
    """
    ratios = loss_ratios(losses)
    flash = ratios[ratios["kind"] == FLASH]
    differs = (flash["low"] > 1) | (flash["high"] < 1)
    words = [
        f"{row.centre:.3f} in {row.precision.upper()} ({row.low:.3f} to {row.high:.3f}, {row.seeds} seeds; "
        f"{row.detectable:.3f} would have been seen in 4 cases of 5)"
        for row in flash.itertuples()
    ]
    others = ratios[ratios["kind"] == OTHER].set_index("precision")["spread"]
    text = f"Held-out loss of Flash over that of Baseline: {'; '.join(words)}."
    if len(others):
        others = others.rename(lambda precision: precision.removesuffix("_emulated").upper())
        spread = ", ".join(f"{value:.1%} in {precision}" for precision, value in others.items())
        text += f" Two initialisations differ by {spread} (standard deviation)."
    rises = barriers(lines)
    between, apart = rises[rises["kind"] == FLASH], rises[rises["kind"] == OTHER]
    blocked = int((~between["connected"]).sum())
    text += (
        f" On the straight line from Flash's weights to Baseline's the loss rises by at most "
        f"{between['barrier'].max():.1%}: a barrier ({BARRIER:.0%} or more) in {blocked} of {len(between)} pairs"
    )
    if len(apart):
        text += (
            f"; between two initialisations in {(~apart['connected']).sum()} of {len(apart)}, by "
            f"{apart['barrier'].min():.0%} to {apart['barrier'].max():.0%}"
        )
    matters = answer(int(differs.sum()) + blocked, len(flash) + len(between))
    return Verdict("'it matters which attention a model was trained with'", matters, text + ".")
