"""Real kernels: the error of each against standard attention's, in the same format."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.figures.theme import COLOURS, describe

_SIDES = {"ratio": "output (limit 2)", "gradient_ratio": "gradients (limit 3)"}


def kernel_ratios(table: pd.DataFrame) -> alt.LayerChart:
    """Largest error over standard attention's, a row per kernel and dtype, output and gradients.

    Parameters
    ----------
    table : `fa_study.kernels.measure`'s. FP64 is left out, since its standard is that of FP32.
    """
    measured = table[table["runs"].astype(bool) & (table["dtype"] != "fp64")].copy()
    measured["row"] = measured["kernel"] + ", " + measured["dtype"].str.upper()
    rows = measured.melt(["row"], list(_SIDES), "side", "value").dropna(subset=["value"])
    rows["side"] = rows["side"].map(_SIDES)
    colours = alt.Scale(domain=list(_SIDES.values()), range=[COLOURS["golden"], COLOURS["repeat"]])
    points = (
        alt.Chart(rows)
        .mark_point(size=60, filled=True)
        .encode(
            alt.X("value:Q")
            .title("largest error / standard attention's")
            .scale(domain=[0, max(3.2, rows["value"].max())])
            .axis(tickCount=7),
            alt.Y("row:N", sort=None).title(None).axis(labelLimit=240),
            alt.Color("side:N").title(None).scale(colours),
            alt.Shape("side:N").title(None).scale(domain=list(_SIDES.values())),
            tooltip=["row:N", "side:N", alt.Tooltip("value:Q").format(".3f")],
        )
    )
    limits = pd.DataFrame({"limit": [2.0, 3.0], "side": list(_SIDES.values())})
    rules = alt.Chart(limits).mark_rule(strokeDash=[4, 4]).encode(alt.X("limit:Q"), alt.Color("side:N").scale(colours))
    largest = rows.groupby("side")["value"].max()
    text = "; ".join(f"{side}: at most {value:.2f}" for side, value in largest.items())
    return describe((rules + points).properties(width=230), f"Error ratios of {len(measured)} kernels. {text}.")
