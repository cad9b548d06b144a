"""Figure 7: how far Flash-trained and Baseline-trained weights are apart, over training."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.figures.theme import COLOURS, describe, log_y

# Metric -> axis title. Weights have no unit.
TITLES = {
    "max_difference": "Max Difference of the weights",
    "wasserstein": "Wasserstein distance of the weights",
    "relative_l2": "Relative L2 distance of the weights",
}


def spread_over_seeds(frame: pd.DataFrame, metric: str, by: list[str]) -> pd.DataFrame:
    """Median, smallest and largest value of `metric` over the seeds, one row for each combination of `by`."""
    grouped = frame.groupby(by, sort=True)[metric]
    return grouped.agg(median="median", low="min", high="max", seeds="count").reset_index()


def weight_differences(frame: pd.DataFrame, metric: str) -> alt.LayerChart:
    """Distance between the weights of paired runs over training, one line per precision, on a log axis.

    Parameters
    ----------
    frame : a row per (precision, seed, step), with the column named by `metric`. Steps at which every seed's distance
        is exactly 0 (step 0, since a pair starts from the same weights) have no place on a log axis and are left out.
    metric : "max_difference", "wasserstein" or "relative_l2".

    Returns
    -------
    alt.LayerChart : the median over seeds as a line, smallest to largest as a band.
    """
    if metric not in TITLES:
        raise ValueError(f"metric is one of {', '.join(TITLES)}, got {metric!r}")
    # A single zero on a log axis makes the whole band disappear.
    shown = spread_over_seeds(frame[frame[metric] > 0], metric, ["precision", "step"])
    shown["arm"] = "Flash against Baseline, " + shown["precision"].str.upper()
    base = alt.Chart(shown).encode(alt.X("step:Q").title("training step"))
    y = log_y("median", TITLES[metric])
    band = base.mark_area(color=COLOURS["Flash"], opacity=0.2).encode(
        log_y("low", TITLES[metric]), alt.Y2("high:Q"), alt.Detail("arm:N")
    )
    line = base.mark_line(color=COLOURS["Flash"]).encode(y, alt.StrokeDash("arm:N").title("median of the seeds"))
    points = base.mark_point(color=COLOURS["Flash"], fill=COLOURS["Flash"]).encode(
        y,
        alt.Shape("arm:N").legend(None),
        tooltip=[
            alt.Tooltip("arm:N").title("runs"),
            alt.Tooltip("step:Q"),
            alt.Tooltip("median:Q").format(".3e"),
            alt.Tooltip("low:Q").format(".3e").title("smallest"),
            alt.Tooltip("high:Q").format(".3e").title("largest"),
            alt.Tooltip("seeds:Q"),
        ],
    )
    last = shown[shown["step"] == shown["step"].max()]
    summary = "; ".join(f"{row.arm}: {row.median:.2e}" for row in last.itertuples())
    return describe(band + line + points, f"{TITLES[metric]} over training steps. At the last step, {summary}.")
