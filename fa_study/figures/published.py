"""Charts of published numbers beside ours: what was published is grey, crosses or a dotted line."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from fa_study.experiments.published import accumulation, fa3_errors, lazy_rescaling, sinks
from fa_study.figures.bands import band_lines, positive, powers_of_two, seed_bands, summary
from fa_study.figures.theme import COLOURS, describe, log_y

PUBLISHED = "#666666"


def _crosses(points: pd.DataFrame, x: alt.X, y: alt.Y, source: str) -> alt.Chart:
    """Published points; `points` holds the columns that x and y name."""
    fields = [x.to_dict()["field"], y.to_dict()["field"]]
    return (
        alt.Chart(points.assign(source=source))
        .mark_point(shape="cross", size=110, angle=45, filled=True, opacity=1)
        .encode(
            x,
            y,
            alt.Color("source:N").scale(range=[PUBLISHED]).title(None),
            tooltip=[alt.Tooltip("source:N"), *(alt.Tooltip(f"{f}:Q").format(".3g") for f in fields)],
        )
    )


def _rule(value: float, words: str, y: alt.Y) -> alt.Chart:
    """A dotted line across the chart at a published value."""
    return (
        alt.Chart(pd.DataFrame({y.to_dict()["field"]: [value], "source": [words]}))
        .mark_rule(strokeDash=[2, 3], strokeWidth=1.5)
        .encode(
            y, alt.Color("source:N").scale(range=[PUBLISHED]).legend(symbolDash=[2, 3], symbolType="stroke").title(None)
        )
    )


def _factor_y(field: str, title: str) -> alt.Y:
    """A logarithmic axis for factors near 1: plain numbers, no empty decade. It wins over another layer's default."""
    return alt.Y(field, type="quantitative").scale(type="log", nice=False).title(title).axis(format="~g")


def _join(*layers: alt.Chart | alt.LayerChart, title: str) -> alt.LayerChart:
    return alt.layer(*layers).resolve_scale(color="independent").properties(title=title)


def fa3_ratio(frame: pd.DataFrame, fmt: str, reference: str) -> alt.LayerChart:
    """RMSE of standard attention over that of Flash against N, a line per D.

    Parameters
    ----------
    frame : the table of FlashAttention-3's errors.
    fmt : "FP16" or "FP8".
    reference : "original" or "rounded": inputs of the true value.
    """
    top, bottom, published = fa3_errors.RATIOS[fmt]
    wide = frame[frame["reference"] == reference].pivot_table(index=["N", "D", "seed"], columns="arm", values="rms")
    ratio = (wide[top] / wide[bottom]).rename("ratio").reset_index()
    shown = seed_bands(ratio, "ratio", ["D", "N"])
    shown["head size"] = shown["D"].astype(str)
    title = f"{fmt}, true value from inputs {'before' if reference == 'original' else 'after'} rounding"
    words = "standard RMSE / Flash RMSE"
    x = powers_of_two("N", "sequence length N").axis(values=sorted(shown["N"].unique().tolist()))
    lines = band_lines(shown, x, words, colour=COLOURS["Flash"], series="head size", legend="D", log=False)
    y = _factor_y("median", words)
    last = shown[shown["N"] == shown["N"].max()]
    return describe(
        _join(lines, _rule(published, f"published: {published:g}", y), title=title),
        f"{title}: {words} at N = {shown['N'].max()}: {summary(last, 'head size', '.2g')}; published {published:g}.",
    )


def rescaling_errors(frame: pd.DataFrame, value: str) -> alt.LayerChart:
    """Relative error of FP8 attention against the spread of the logits, with the published points.

    Parameters
    ----------
    value : "l2" or "l1", see `lazy_rescaling.relative`.
    """
    names = {"l2": "RMS error / RMS of output", "l1": "mean |error| / mean |output|"}
    if value not in names:
        raise ValueError(f"value is one of {', '.join(names)}, got {value!r}")
    shown = seed_bands(lazy_rescaling.relative(frame), value, ["offset", "threshold", "std"])
    shown["setting"] = [f"P × 2^{r.offset}, threshold {r.threshold:g}" for r in shown.itertuples()]
    x = alt.X("std:Q").title("standard deviation of the logits")
    lines = band_lines(shown, x, names[value], colour=COLOURS["Flash"], series="setting", legend="our emulation")
    points = pd.DataFrame(
        [{"std": std, "value": v} for line in lazy_rescaling.PUBLISHED.values() for std, v in line.items()]
    )
    last = shown[shown["std"] == shown["std"].max()]
    return describe(
        _join(lines, _crosses(points, x, log_y("value", names[value]), "measured on a GPU"), title=names[value]),
        f"{names[value]} at a standard deviation of {shown['std'].max():g}: {summary(last, 'setting')}.",
    )


def saturated_weights(frame: pd.DataFrame) -> alt.LayerChart:
    """Weights per query row that saturate, against the spread of the logits."""
    part = frame[frame["threshold"] == frame["threshold"].max()]
    shown = seed_bands(part, "saturated", ["offset", "std"])
    shown["setting"] = [f"P × 2^{offset}, threshold 4" for offset in shown["offset"]]
    x = alt.X("std:Q").title("standard deviation of the logits")
    y = "saturated weights per row"
    last = shown[shown["std"] == shown["std"].max()]
    return describe(
        band_lines(shown, x, y, colour=COLOURS["Flash"], series="setting", legend="our emulation", log=False),
        f"{y} at a standard deviation of {shown['std'].max():g}: {summary(last, 'setting', '.3g')}.",
    )


def sink_factors(frame: pd.DataFrame, sink_values: str) -> alt.LayerChart:
    """By how much reverse order and the scale 256 lower the mean squared error, with the published range."""
    table = sinks.factors(frame[frame["sink_values"] == sink_values])
    shown = positive(seed_bands(table, "factor", ["change", "delta"]))
    names = {
        "order": "to reverse order, P × 1",
        "scale": "to P × 256, forward",
        "rest": "to reverse order, P × 256",
    }
    shown["what"] = shown["change"].map(names)
    x = alt.X("delta:Q").title("Δ: what the sinks' scores are raised by")
    y = "mean squared error falls by the factor"
    lines = band_lines(shown, x, y, colour=COLOURS["Flash"], series="what", legend="what is changed", log=False)
    low, high = sinks.PUBLISHED_FACTOR
    box = pd.DataFrame({"low": [low], "high": [high], "source": [f"published: {low:g} to {high:g}"]})
    band = (
        alt.Chart(box)
        .mark_rect(opacity=0.25)
        .encode(_factor_y("low", y), alt.Y2("high:Q"), alt.Color("source:N").scale(range=[PUBLISHED]).title(None))
    )
    title = "sinks with values like others" if sink_values == "ordinary" else "sinks without values"
    peak = shown[shown["delta"] == 6]
    return describe(_join(band, lines, title=title), f"{title}: {y} at delta = 6: {summary(peak, 'what', '.2g')}.")


def sink_underflow(frame: pd.DataFrame) -> alt.LayerChart:
    """Share of weights outside the sinks that become 0, with the published formula for forward order."""
    part = frame[(frame["sink_values"] == "ordinary") & ((frame["order"] == "forward") | (frame["scale"] == 1))]
    shown = seed_bands(part, "flushed", ["order", "scale", "delta"])
    shown["setting"] = [f"{r.order}, P × {r.scale}" for r in shown.itertuples()]
    x = alt.X("delta:Q").title("Δ: what the sinks' scores are raised by")
    y = "share of weights rounded to 0"
    lines = band_lines(shown, x, y, colour=COLOURS["Flash"], series="setting", legend="key order, scale", log=False)
    deltas = np.linspace(0, 12, 49)
    curves = pd.concat(
        pd.DataFrame({"delta": deltas, "value": sinks.predicted_flush(deltas, s), "scale": s}) for s in sinks.SCALES
    )
    formula = (
        alt.Chart(curves.assign(source="published formula"))
        .mark_line(strokeDash=[2, 3], strokeWidth=1.5)
        .encode(
            x,
            alt.Y("value:Q").title(y),
            alt.Detail("scale:N"),
            alt.Color("source:N").scale(range=[PUBLISHED]).legend(symbolDash=[2, 3], labelLimit=320).title(None),
        )
    )
    middle = shown[shown["delta"] == 6]
    return describe(_join(lines, formula, title="underflow"), f"{y} at delta = 6: {summary(middle, 'setting', '.2g')}.")


def product_errors(frame: pd.DataFrame, inputs: str, how: str) -> alt.LayerChart:
    """Largest error of an FP8 product over the product's RMS against K, a line per promotion."""
    part = frame[(frame["inputs"] == inputs) & (frame["how"] == how)]
    shown = positive(seed_bands(part, "scaled", ["promotion", "K"]))
    shown["promoted"] = [f"every {p}" if p else "never" for p in shown["promotion"]]
    x, y = powers_of_two("K", "terms K"), "largest error / RMS of product"
    lines = band_lines(shown, x, y, colour=COLOURS["low precision"], series="promoted", legend="promoted to FP32")
    point = pd.DataFrame({"K": [accumulation.PUBLISHED_K], "value": [accumulation.PUBLISHED_ERROR]})
    title = f"{inputs} inputs, {how}"
    last = shown[shown["K"] == shown["K"].max()]
    return describe(
        _join(lines, _crosses(point, x, log_y("value", y), "published: nearly 2 %"), title=title),
        f"{title}: {y} at K = {shown['K'].max()}, promoted {summary(last, 'promoted')}.",
    )
