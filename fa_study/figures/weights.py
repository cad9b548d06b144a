"""Figures 7 and 8: how far the weights of paired training runs are apart, over training."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.experiments.drift_ratios import per_seed
from fa_study.figures.theme import COLOURS, describe, log_y, switch

# Metric -> axis title. Weights have no unit.
TITLES = {
    "max_difference": "Max Difference of the weights",
    "wasserstein": "Wasserstein distance of the weights",
    "mean_difference": "mean |difference| of the weights",
    "relative_l2": "relative L2 distance of the weights",
}
# What the two runs of a pair differ in -> its colour.
KIND_COLOURS = {
    "Flash against Baseline": COLOURS["Flash"],
    "ulp twin": COLOURS["ulp twins"],
    "BF16 against FP32": COLOURS["low precision"],
    "FP16 against FP32": "#7E3163",
    "other initialisation": COLOURS["initialisation"],
    "other data order": COLOURS["data order"],
    "tiled against Baseline": COLOURS["tiled"],
    "batch in parts": COLOURS["repeat"],
    "other thread count": "#555555",
    "the same again": "#BBBBBB",
}


def spread_over_seeds(frame: pd.DataFrame, metric: str, by: list[str]) -> pd.DataFrame:
    """Median, smallest and largest value of `metric` over the seeds, one row for each combination of `by`.

    Of several pairs of one seed the median counts.
    """
    grouped = per_seed(frame, metric, by).groupby(by, sort=True)[metric]
    return grouped.agg(median="median", low="min", high="max", seeds="count").reset_index()


def spread_points(base: alt.Chart, y: alt.Y, middle: str) -> alt.Chart:
    """Points at the medians, whose tooltips tell the spread over the seeds; `middle` names the median's column."""
    return base.mark_point().encode(
        y,
        alt.Shape("precision:N").legend(None),
        tooltip=[
            alt.Tooltip("kind:N").title("pair"),
            alt.Tooltip("precision:N"),
            alt.Tooltip("step:Q"),
            alt.Tooltip(f"{middle}:Q").format(".3e").title("median"),
            alt.Tooltip("low:Q").format(".3e").title("smallest"),
            alt.Tooltip("high:Q").format(".3e").title("largest"),
            alt.Tooltip("seeds:Q"),
        ],
    )


def weight_differences(frame: pd.DataFrame, metric: str) -> alt.LayerChart:
    """Distance between the weights of paired runs over training: a colour per kind of pair, a dash per precision.

    Parameters
    ----------
    frame : a row per (kind, precision, seed, step), with the column named by `metric`. Distances of exactly 0 (step 0,
        where most pairs start from the same weights) have no place on a log axis and are left out.
    metric : one of `TITLES`.

    Returns
    -------
    alt.LayerChart : the median over seeds as a line, smallest to largest as a band.
    """
    if metric not in TITLES:
        raise ValueError(f"metric is one of {', '.join(TITLES)}, got {metric!r}")
    # A single zero on a log axis makes the whole band disappear.
    shown = spread_over_seeds(frame[frame[metric] > 0], metric, ["kind", "precision", "step"])
    shown["precision"] = shown["precision"].str.upper()
    kinds = [kind for kind in KIND_COLOURS if kind in set(shown["kind"])]
    colour = (
        alt.Color("kind:N", sort=kinds).scale(domain=kinds, range=[KIND_COLOURS[kind] for kind in kinds]).title(None)
    )
    base = alt.Chart(shown).encode(alt.X("step:Q").title("training step").axis(tickCount=6), colour)
    band = base.mark_area(opacity=1, fillOpacity=0.2).encode(
        log_y("low", TITLES[metric]), alt.Y2("high:Q"), alt.Detail(["kind:N", "precision:N"])
    )
    y = log_y("median", TITLES[metric])
    line = base.mark_line().encode(y, alt.StrokeDash("precision:N").title(None))
    points = spread_points(base, y, "median")
    last = shown[shown["step"] == shown["step"].max()]
    summary = "; ".join(f"{row.kind}, {row.precision}: {row.median:.2e}" for row in last.itertuples())
    return describe(band + line + points, f"{TITLES[metric]} over training steps. At the last step, {summary}.")


def group_differences(frame: pd.DataFrame) -> alt.LayerChart:
    """Distance between the weights of one layer group over training; the reader chooses group and metric.

    Parameters
    ----------
    frame : rows of level "group" of Figure 7's table, of the kinds and steps to be drawn.

    Returns
    -------
    alt.LayerChart : the median over seeds as a line, smallest to largest as a band.
    """
    long = frame.melt(["kind", "precision", "seed", "step", "name"], list(TITLES), "metric")
    data = spread_over_seeds(long[long["value"] > 0], "value", ["kind", "precision", "step", "name", "metric"])
    for column in ("median", "low", "high"):
        data[column] = data[column].map(lambda x: float(f"{x:.4g}"))
    data["precision"] = data["precision"].str.upper()
    kinds = [kind for kind in KIND_COLOURS if kind in set(data["kind"])]
    group = switch("group", "Part", {name: name.replace("_", " ") for name in sorted(set(data["name"]))})
    metric = switch("metric", "Metric", {name: title.removesuffix(" of the weights") for name, title in TITLES.items()})
    base = (
        alt.Chart(data)
        .transform_filter("datum.name == group && datum.metric == metric")
        .encode(
            alt.X("step:Q").title("training step").axis(tickCount=6),
            alt.Color("kind:N", sort=kinds)
            .scale(domain=kinds, range=[KIND_COLOURS[kind] for kind in kinds])
            .title(None),
        )
    )
    band = base.mark_area(opacity=1, fillOpacity=0.2).encode(
        log_y("low", "distance of the group's weights"), alt.Y2("high:Q"), alt.Detail(["kind:N", "precision:N"])
    )
    line = base.mark_line(point=True).encode(
        log_y("median", "distance of the group's weights"),
        alt.StrokeDash("precision:N").title(None).legend(symbolType="stroke"),
        tooltip=["kind:N", "precision:N", "step:Q", alt.Tooltip("median:Q").format(".3e"), "seeds:Q"],
    )
    last = data[(data["step"] == data["step"].max()) & (data["metric"] == "relative_l2")]
    flash = last[last["kind"] == "Flash against Baseline"].groupby("precision")["median"]
    words = "; ".join(f"{precision}: {part.min():.2g} to {part.max():.2g}" for precision, part in flash)
    text = (
        f"Distance of the weights by part of the model. Relative L2 of Flash at the last step over the parts: {words}."
    )
    return describe((band + line).add_params(group, metric), text)
