"""The chart of a comparison: distances per layer, or over the steps of a trajectory."""

from __future__ import annotations

from pathlib import Path

import altair as alt
import pandas as pd

_METRICS = {"max_difference": "Max Difference", "wasserstein": "Wasserstein distance"}
_MOST_LAYERS = 60


def comparison_chart(frame: pd.DataFrame) -> alt.Chart:
    """Max Difference and Wasserstein distance (pooled values): lines over steps, or points per layer, on log axes."""
    _use_theme()
    series = "step" in frame
    rows = frame[(frame.level == ("model" if series else "group")) & (frame.average == "pooled")]
    if not series:
        rows = rows.sort_values("max_difference", ascending=False).head(_MOST_LAYERS)
    x = "step" if series else "name"
    long = rows.melt(id_vars=[x], value_vars=list(_METRICS), var_name="metric", value_name="distance")
    # A logarithmic axis has no zero: equal weights are left out rather than drawn wrongly.
    long = long[long["distance"] > 0].assign(metric=lambda t: t["metric"].map(_METRICS))
    distance = alt.Scale(type="log")
    chart = alt.Chart(long)
    if series:
        marks = chart.mark_line(point=True).encode(
            alt.X("step:Q").title("Training step"), alt.Y("distance:Q", scale=distance).title("Distance (pooled)")
        )
        return marks.encode(alt.Color("metric:N").title(None)).properties(width=480, height=300)
    marks = chart.mark_point(filled=True, size=60).encode(
        alt.X("distance:Q", scale=distance).title("Distance (values of the layer pooled)"),
        alt.Y("name:N", sort=list(rows["name"])).title(None).axis(labelLimit=300),
    )
    return marks.encode(alt.Color("metric:N").title(None)).properties(width=480)


def save_chart(chart: alt.Chart, path: Path) -> None:
    """Write .html with all scripts inside, .svg or .png."""
    if path.suffix == ".html":
        chart.save(str(path), inline=True)
    else:
        chart.save(str(path), scale_factor=2)


def _use_theme() -> None:
    try:
        from fa_study.figures import register_theme
    except ImportError:  # the figures are an optional part of an installation
        return
    register_theme()
