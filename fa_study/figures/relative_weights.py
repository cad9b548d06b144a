"""Figure 8 with switches: what depends on the metric, on the average and on what "relative" divides by."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.experiments.drift_ratios import PAPER_RATIO, PREDICTIONS, per_seed
from fa_study.figures.theme import COLOURS, describe, log_y, switch
from fa_study.figures.weights import KIND_COLOURS, spread_points

METRIC_LABELS = {
    "wasserstein": "Wasserstein distance",
    "relative_l2": "relative L2",
    "max_difference": "Max Difference",
    "mean_difference": "mean |difference|",
    PREDICTIONS: "RMS of the predictions",
}
AVERAGE_LABELS = {
    "pooled": "all weights pooled",
    "mean": "mean over tensors",
    "weighted": "mean over tensors, weighted by size",
}
SHOWN = {
    "raw": "as it is",
    "relative": "over the distance from step 0",
    "minus_start": "minus its value at step 0 (invalid)",
}


def relative_weights(frame: pd.DataFrame) -> alt.LayerChart:
    """Distance over training for every kind of pair, in the metric, average and reference that the reader chooses.

    Parameters
    ----------
    frame : `relative_drift`, of the kinds and steps to be drawn. Values of 0 or less have no place on a log axis.

    Returns
    -------
    alt.LayerChart : the median over seeds as a line, smallest to largest as a band.
    """
    rows = frame.assign(precision=frame["precision"].str.removesuffix("_emulated").str.upper())
    by = ["kind", "precision", "step", "metric", "average"]
    grouped = per_seed(rows, list(SHOWN), by).groupby(by, sort=False)
    parts = {"seeds": grouped["seed"].nunique()}
    for shown in SHOWN:
        for end, reduce in (("mid", "median"), ("low", "min"), ("high", "max")):
            # Four digits draw the same picture and keep the page light.
            parts[f"{shown}_{end}"] = grouped[shown].agg(reduce).map(lambda x: float(f"{x:.4g}"))
    data = pd.DataFrame(parts).reset_index()
    kinds = [kind for kind in KIND_COLOURS if kind in set(data["kind"])]
    metric, average = switch("metric", "Metric", METRIC_LABELS), switch("average", "Average", AVERAGE_LABELS)
    shown = switch("shown", "Shown", SHOWN)
    base = (
        alt.Chart(data)
        .transform_filter("datum.metric == metric && datum.average == average")
        .transform_calculate(**{end: f"datum[shown + '_{end}']" for end in ("mid", "low", "high")})
        .transform_filter("datum.low > 0")
        .encode(
            alt.X("step:Q").title("training step").axis(tickCount=6),
            alt.Color("kind:N", sort=kinds)
            .scale(domain=kinds, range=[KIND_COLOURS[kind] for kind in kinds])
            .title(None)
            .legend(columns=2),
        )
    )
    band = base.mark_area(opacity=1, fillOpacity=0.15).encode(
        log_y("low", "distance"), alt.Y2("high:Q"), alt.Detail(["kind:N", "precision:N"])
    )
    y = log_y("mid", "distance")
    line = base.mark_line().encode(y, alt.StrokeDash("precision:N").title(None))
    points = spread_points(base, y, "mid")
    chart = (band + line + points).add_params(metric, average, shown)
    values = "; ".join(f"{row.kind}, {row.precision}: {row.raw_mid:.2e}" for row in _at_the_end(data).itertuples())
    return describe(chart, f"Wasserstein distance of all weights over training. At the last step, {values}.")


def low_precision_ratio(frame: pd.DataFrame) -> alt.LayerChart:
    """Low precision over Flash with its interval, beside the paper's 2 to 5, in the reader's metric and average.

    Parameters
    ----------
    frame : `low_precision_ratios`.
    """
    numbers = ("centre", "low_end", "high_end")
    data = frame.assign(
        pair=frame["low"] + ", Flash in " + frame["precision"].str.upper(),
        **{name: frame[name].map(lambda x: float(f"{x:.4g}")) for name in numbers},
    )
    metric, average = switch("metric", "Metric", METRIC_LABELS), switch("average", "Average", AVERAGE_LABELS)
    paper = pd.DataFrame({"low": [PAPER_RATIO[0]], "high": [PAPER_RATIO[1]]})
    paper = paper.assign(
        middle=(paper["low"] * paper["high"]) ** 0.5, what=f"the paper: {PAPER_RATIO[0]:g} to {PAPER_RATIO[1]:g}"
    )
    area = (
        alt.Chart(paper)
        .mark_rect(opacity=0.25, color=COLOURS["repeat"])
        .encode(log_y("low", "low precision over Flash").axis(format="~g", tickCount=4), alt.Y2("high:Q"))
    )
    label = area.mark_text(align="right", x="width", dx=-4, color="#555555").encode(
        alt.Y("middle:Q"), alt.Text("what:N")
    )
    pairs = data.drop_duplicates("pair").sort_values("pair")
    names, colours = pairs["pair"].tolist(), [KIND_COLOURS[low] for low in pairs["low"]]
    dashes = [[1, 0] if precision == "bf16" else [6, 3] for precision in pairs["precision"]]
    base = (
        alt.Chart(data)
        .transform_filter("datum.metric == metric && datum.average == average")
        .encode(
            alt.X("step:Q").title("training step").axis(tickCount=6),
            alt.Color("pair:N")
            .scale(domain=names, range=colours)
            .title(None)
            .legend(labelLimit=320, symbolType="stroke", symbolStrokeWidth=2),
        )
    )
    band = base.mark_area(opacity=1, fillOpacity=0.2).encode(alt.Y("low_end:Q"), alt.Y2("high_end:Q"))
    line = base.mark_line(point=True).encode(
        alt.Y("centre:Q"),
        alt.StrokeDash("pair:N").scale(domain=names, range=dashes).title(None),
        tooltip=[
            *(alt.Tooltip(f"{name}:N") for name in ("pair", "step", "seeds")),
            *(alt.Tooltip(f"{name}:Q").format(".3g") for name in numbers),
        ],
    )
    values = "; ".join(
        f"{row.pair}: {row.centre:.2g} ({row.low_end:.2g} to {row.high_end:.2g})"
        for row in _at_the_end(data).itertuples()
    )
    text = (
        f"Ratio of the distance that low precision makes to that of Flash. At the last step, in Wasserstein, {values}."
    )
    return describe((area + label + band + line).add_params(metric, average), text)


def _at_the_end(data: pd.DataFrame) -> pd.DataFrame:
    """The rows that the switches show first, at the last step: what the text alternative tells."""
    first = (data["metric"] == "wasserstein") & (data["average"] == "pooled")
    return data[first & (data["step"] == data["step"].max())]
