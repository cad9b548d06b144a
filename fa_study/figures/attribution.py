"""Which rounding is to blame? Bars per rounding site."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.experiments.attribution import SITES
from fa_study.figures.bands import seed_bands, tooltips
from fa_study.figures.theme import COLOURS, describe


def site_bars(
    frame: pd.DataFrame, value: str, x_title: str, title: str, *, method: str = "Flash", mark_at: float | None = None
) -> alt.LayerChart:
    """A bar per rounding site: the median over the seeds with the 5th to 95th percentile.

    Parameters
    ----------
    frame : a row per site and seed, with the column named by `value`.
    method : "Flash" or "Baseline", for the colour.
    mark_at : where a vertical line is drawn, such as the value that an unbiased site would have.
    """
    shown = seed_bands(frame, value, ["site"])
    base = alt.Chart(shown).encode(alt.Y("site:N", sort=list(SITES)).title(None))
    bars = base.mark_bar(color=COLOURS[method]).encode(
        alt.X("median:Q").title(x_title), tooltip=tooltips("site", number=".3g")
    )
    whiskers = base.mark_rule(color="black").encode(alt.X("low:Q"), alt.X2("high:Q"))
    layers = [bars, whiskers]
    if mark_at is not None:
        line = alt.Chart(pd.DataFrame({"at": [mark_at]})).mark_rule(color="black", strokeDash=[4, 3])
        layers.append(line.encode(alt.X("at:Q")))
    ordered = shown.sort_values("median", ascending=False)
    return describe(
        alt.layer(*layers).properties(title=title, width=220, height=190),
        f"{x_title}: " + "; ".join(f"{r.site} {r.median:.3g}" for r in ordered.itertuples()) + ".",
    )
