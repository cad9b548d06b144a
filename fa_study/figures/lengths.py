"""Figure 5: the deviation between Flash and Baseline against the sequence length."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.figures.bands import band_lines, format_name, positive, powers_of_two, seed_bands
from fa_study.figures.theme import COLOURS, describe

STATISTICS = {"max": "max difference", "mean_abs": "mean |difference|", "std_abs": "std. dev. of |difference|"}


def lengths(frame: pd.DataFrame, statistic: str, *, relative: bool, title: str = "") -> alt.LayerChart:
    """One panel of Figure 5.

    Parameters
    ----------
    frame : rows of Flash against Baseline of one distribution and family; a line per format.
    statistic : "max", "mean_abs" or "std_abs".
    relative : in units of the RMS of the true output, instead of absolute.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic is one of {', '.join(STATISTICS)}, got {statistic!r}")
    value = frame[statistic] / frame["output_rms"] if relative else frame[statistic]
    shown = positive(seed_bands(frame.assign(value=value), "value", ["format", "N"]))
    shown["format"] = shown["format"].map(format_name)
    name = STATISTICS[statistic] + (" / RMS of output" if relative else "")
    chart = band_lines(
        shown, powers_of_two("N", "sequence length N"), name, colour=COLOURS["Flash"], series="format", legend="format"
    )
    growth = []
    for fmt, line in shown.groupby("format", sort=False):
        ends = line.sort_values("N")["median"]
        growth.append(f"{fmt} from {ends.iloc[0]:.2e} to {ends.iloc[-1]:.2e}")
    return describe(
        chart.properties(title=title),
        f"{name} from N = {shown['N'].min()} to {shown['N'].max()}: {'; '.join(growth)}.",
    )
