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
    marks = [f"p < {level:g}", "not told from zero"]
    data = effects.assign(
        precision=effects["precision"].str.upper(),
        found=(effects["p"] < level).map({True: marks[0], False: marks[1]}),
    )
    precisions = sorted(set(data["precision"]))
    base = alt.Chart(data).encode(
        alt.X("step:Q").title("training step").axis(tickCount=6),
        alt.Y("share:Q").title("systematic share").axis(format="%", tickCount=5),
        color=alt.value(COLOURS["Flash"]),
        detail="precision:N",
    )
    line = base.mark_line().encode(alt.StrokeDash("precision:N").scale(domain=precisions).title(None))
    points = base.mark_point(filled=True).encode(
        alt.Shape("found:N").scale(domain=marks, range=["diamond", "circle"]).title(None),
        alt.Size("found:N").scale(domain=marks, range=[140, 25]).title(None),
        tooltip=[
            *("precision:N", "step:Q", "twins:Q"),
            alt.Tooltip("share:Q").format(".2%"),
            alt.Tooltip("p:Q").format(".2g"),
            alt.Tooltip("detectable:Q").format(".2%").title("share found 4 times of 5"),
        ],
    )
    found = data[data["p"] < level].groupby(["space", "precision"])["step"].agg(["count", "max"])
    words = "; ".join(
        f"{space} in {p}: {row['count']} snapshots, the last at step {row['max']}"
        for (space, p), row in found.iterrows()
    )
    text = f"Systematic share over training. Told from zero: {words or 'at no snapshot'}."
    both = (line + points).properties(height=150).facet(alt.Facet("space:N").title(None), columns=1)
    return describe(both.resolve_scale(y="independent"), text)
