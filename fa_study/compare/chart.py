"""The chart of a comparison: distances per layer, or over the steps of a trajectory."""

from __future__ import annotations

from pathlib import Path

import altair as alt
import pandas as pd

from fa_study.figures import register_theme

_METRICS = {"max_difference": "Max Difference", "wasserstein": "Wasserstein distance"}
_MOST_LAYERS = 60


def comparison_chart(frame: pd.DataFrame) -> alt.Chart:
    """Max Difference and Wasserstein distance (pooled values): lines over steps, or points per layer, on log axes."""
    register_theme()
    series = "step" in frame
    rows = frame[(frame.level == ("model" if series else "group")) & (frame.average == "pooled")]
    if not series:
        rows = rows.sort_values("max_difference", ascending=False).head(_MOST_LAYERS)
    x = "step" if series else "name"
    long = rows.melt(id_vars=[x], value_vars=list(_METRICS), var_name="metric", value_name="distance")
    # A logarithmic axis has no zero: equal weights are left out rather than drawn wrongly.
    long = long[long["distance"] > 0].assign(metric=lambda t: t["metric"].map(_METRICS))
    if long.empty:
        nothing = pd.DataFrame({"text": ["No difference to draw"]})
        return alt.Chart(nothing).mark_text(fontSize=14).encode(alt.Text("text:N")).properties(width=480, height=60)
    log = alt.Scale(type="log")
    chart = alt.Chart(long).encode(alt.Color("metric:N").title(None)).properties(width=480)
    if series:
        return chart.mark_line(point=True).encode(
            alt.X("step:Q").title("Training step"),
            alt.Y("distance:Q", scale=log).title("Distance (all values pooled)"),
            alt.StrokeDash("metric:N").title(None),
        )
    return chart.mark_point(filled=True, size=60).encode(
        alt.X("distance:Q", scale=log).title("Distance (values of the layer pooled)"),
        alt.Y("name:N", sort=list(rows["name"])).title(None).axis(labelLimit=300),
        alt.Shape("metric:N").title(None),
    )


def save_chart(chart: alt.Chart, path: Path) -> None:
    """Write .html with all scripts inside, .svg or .png."""
    if path.suffix == ".html":
        chart.save(str(path), inline=True)
    else:
        chart.save(str(path), scale_factor=2)
