"""Figure 8's last question: the share of the drift that all Flash twins have in common."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.figures.theme import COLOURS, describe


def systematic(effects: pd.DataFrame, *, level: float = 0.01) -> alt.FacetChart:
    """Systematic share of the squared distance between Flash and Baseline twins over training.

    Parameters
    ----------
    effects : `systematic_effect`; p below `level` is drawn as a filled mark.
    """
    data = effects.assign(
        precision=effects["precision"].astype(str).str.upper(),
        space=effects["space"].astype(str),
        found=(effects["p"] < level).map({True: f"p < {level:g}", False: "not told from zero"}),
    )
    colours = alt.Scale(domain=["BF16", "FP32"], range=[COLOURS["Flash"], COLOURS["ulp twins"]])
    base = alt.Chart(data).encode(
        alt.X("step:Q").title("training step").axis(tickCount=6),
        alt.Y("share:Q").title("systematic share of the squared distance").axis(format="%"),
        alt.Color("precision:N").scale(colours).title(None),
    )
    line = base.mark_line().encode(alt.StrokeDash("precision:N").title(None))
    points = base.mark_point(size=60).encode(
        alt.Shape("precision:N").title(None),
        alt.FillOpacity("found:N").scale(domain=[f"p < {level:g}", "not told from zero"], range=[1, 0]).title(None),
        tooltip=[
            *("precision:N", "step:Q", "twins:Q"),
            alt.Tooltip("share:Q").format(".2%"),
            alt.Tooltip("p:Q").format(".2g"),
            alt.Tooltip("detectable:Q").format(".2%").title("share with p = 0.05"),
        ],
    )
    found = data[data["p"] < level].groupby(["space", "precision"])["step"].agg(["count", "max"])
    words = "; ".join(
        f"{space} in {p}: {row['count']} snapshots, the last at step {row['max']}"
        for (space, p), row in found.iterrows()
    )
    text = f"Systematic share over training. Told from zero: {words or 'at no snapshot'}."
    return describe((line + points).properties(width=240).facet("space:N", columns=2).resolve_scale(y="shared"), text)
