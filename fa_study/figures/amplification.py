"""Drift is amplification: the distance of paired runs over training, and that of twins that fork later."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.experiments.amplification import KINDS, TWIN
from fa_study.figures.theme import describe, log_y
from fa_study.figures.weights import KIND_COLOURS, spread_over_seeds

TITLES = {
    "weights": "relative L2 distance of the weights",
    "predictions": "relative RMS distance of the predictions",
}
# A dash tells a precision, or of two low precisions which one it is.
_DASHES = {"BF16": [1, 0], "FP32": [6, 3], "BF16 against FP32": [1, 0], "FP16 against FP32": [2, 2]}


def amplification(curves: pd.DataFrame, space: str) -> alt.LayerChart:
    """Distance over training of Flash, ulp twins and low precision: median over the seeds, smallest to largest as band.

    Parameters
    ----------
    curves : `experiments.amplification.drift_curves`; pairs that part at the start are drawn.
    space : "weights" or "predictions".
    """
    rows = curves[(curves["space"] == space) & (curves["fork"] == 0)]
    data = spread_over_seeds(rows, "distance", ["kind", "precision", "step"])
    within = ~data["kind"].isin(_DASHES)
    data["pair"] = data["kind"].where(~within, data["kind"] + ", " + data["precision"].str.upper())
    data["dash"] = data["kind"].where(~within, data["precision"].str.upper())
    order = data.assign(place=data["kind"].map(KINDS.index)).sort_values(["place", "precision"])
    pairs = order.drop_duplicates("pair")
    colours = alt.Scale(domain=pairs["pair"].tolist(), range=pairs["kind"].map(KIND_COLOURS).tolist())
    dashes = alt.Scale(domain=pairs["pair"].tolist(), range=pairs["dash"].map(_DASHES).tolist())
    base = alt.Chart(data).encode(
        alt.X("step:Q").title("training step").axis(tickCount=6),
        alt.Color("pair:N").scale(colours).title(None).legend(labelLimit=220, symbolType="stroke", symbolStrokeWidth=2),
    )
    band = base.mark_area(opacity=1, fillOpacity=0.15).encode(
        log_y("low", TITLES[space]), alt.Y2("high:Q"), alt.Detail("pair:N")
    )
    # The points carry the tooltips: a line is thin, and would tell of its first point alone.
    line = base.mark_line(point={"size": 25}).encode(
        log_y("median", TITLES[space]),
        alt.StrokeDash("pair:N").scale(dashes).title(None),
        tooltip=[*("pair:N", "step:Q"), alt.Tooltip("median:Q").format(".2e"), "seeds:Q"],
    )
    last = data[data["step"] == data["step"].max()]
    words = "; ".join(f"{row.pair}: {row.median:.2g}" for row in last.itertuples())
    return describe(band + line, f"{TITLES[space]} over training. At the last step, {words}.")


def forks(curves: pd.DataFrame, space: str) -> alt.FacetChart:
    """Distance of twins from their run against the steps since they parted, a line per step at which they did.

    Parameters
    ----------
    curves : `experiments.amplification.drift_curves`; the twins of the seeds that have later forks are drawn.
    """
    twins = curves[(curves["kind"] == TWIN) & (curves["space"] == space)]
    forked = twins.loc[twins["fork"] > 0, ["precision", "seed"]].drop_duplicates()
    rows = twins.merge(forked).groupby(["precision", "fork", "step"], as_index=False)["distance"].median()
    data = rows.assign(
        since=rows["step"] - rows["fork"],
        precision=rows["precision"].str.upper(),
        parted="step " + rows["fork"].astype(str),
    )
    order = [f"step {fork}" for fork in sorted(set(data["fork"]))]
    line = (
        alt.Chart(data)
        .mark_line(point=True)
        .encode(
            alt.X("since:Q").title("steps since the nudge").axis(tickCount=6),
            log_y("distance", TITLES[space]),
            alt.Color("parted:O", sort=order).scale(scheme="blues", reverse=True).legend(None),
            alt.Shape("parted:O", sort=order).title("nudged at").legend(columns=4, symbolFillColor=KIND_COLOURS[TWIN]),
            tooltip=["parted:N", "step:Q", alt.Tooltip("distance:Q").format(".2e")],
        )
        .properties(width=260, height=180)
    )
    soon = data[data["since"] == 100]
    words = "; ".join(f"{row.precision}, {row.parted}: {row.distance:.2g}" for row in soon.itertuples())
    text = f"Distance of nudged twins. 100 steps after the nudge, {words}."
    return describe(line.facet(alt.Facet("precision:N").title(None), columns=1), text)
