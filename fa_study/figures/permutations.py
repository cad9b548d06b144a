"""Charts of what the Wasserstein distance does not see."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.figures.bands import band_lines, positive, seed_bands, summary
from fa_study.figures.theme import COLOURS, describe
from fa_study.figures.weights import KIND_COLOURS, TITLES, spread_over_seeds

# Metric -> what its dotted line is called.
_YARDSTICKS = {"wasserstein": "two samples of one distribution", "relative_l2": "two independent sets of values"}


def beside_chance(model: pd.DataFrame, metric: str) -> alt.LayerChart:
    """One distance over training on a linear axis, a colour and a dash per kind of pair, with its yardstick dotted.

    Parameters
    ----------
    model : rows of the weights' table for the whole model, of one precision, with every seed.
    metric : wasserstein, whose yardstick is wasserstein_floor, or relative_l2, whose is √2.

    Returns
    -------
    alt.LayerChart : median over the seeds as a line, smallest to largest as a band.
    """
    if metric not in _YARDSTICKS:
        raise ValueError(f"metric is one of {', '.join(_YARDSTICKS)}, got {metric!r}")
    shown = spread_over_seeds(model, metric, ["kind", "step"])
    kinds = [kind for kind in KIND_COLOURS if kind in set(shown["kind"])]
    colours = alt.Scale(domain=kinds, range=[KIND_COLOURS[kind] for kind in kinds])
    base = alt.Chart(shown).encode(
        alt.X("step:Q").title("training step").axis(tickCount=6),
        alt.Color("kind:N", sort=kinds, scale=colours).title(None).legend(symbolType="stroke"),
    )
    y = alt.Y("median:Q").title(TITLES[metric])
    tooltip = [alt.Tooltip("kind:N").title("pair"), alt.Tooltip("step:Q"), alt.Tooltip("median:Q").format(".3g")]
    band = base.mark_area(opacity=1, fillOpacity=0.2).encode(alt.Y("low:Q"), alt.Y2("high:Q"))
    dash = alt.StrokeDash("kind:N", sort=kinds).scale(domain=kinds).title(None)
    line = base.mark_line(point={"size": 25}).encode(y, dash, tooltip=tooltip)
    level = model["wasserstein_floor"].median() if metric == "wasserstein" else 2**0.5
    yardstick = alt.Chart(pd.DataFrame({"step": [shown["step"].max()], "level": level, "name": _YARDSTICKS[metric]}))
    rule = yardstick.mark_rule(strokeDash=[1, 3], strokeWidth=1.5).encode(alt.Y("level:Q"))
    label = yardstick.mark_text(align="right", baseline="top", dy=4, fontSize=12).encode(
        alt.X("step:Q"), alt.Y("level:Q"), alt.Text("name:N")
    )
    ends = shown[shown["step"].isin([shown["step"].min(), shown["step"].max()])]
    words = "; ".join(f"{row.kind}, step {row.step}: {row.median:.3g}" for row in ends.itertuples())
    return describe(
        band + line + rule + label,
        f"{TITLES[metric]} over training; {_YARDSTICKS[metric]}: {level:.3g}. {words}.",
    )


def order_kept(noise: pd.DataFrame, training: pd.DataFrame) -> alt.LayerChart:
    """W1 over mean |difference| against the size of the difference: lines for made noise, points for training.

    Parameters
    ----------
    noise : `experiments.permutations.perturbed`. training : `experiments.permutations.kept_in_training`, of one kind
        of pair.
    """
    lines = positive(seed_bands(noise, "kept", ["n", "size"]))
    lines["values"] = lines["n"].map("noise, {:,} values".format)
    x = alt.X("size:Q").scale(type="log").title("relative size of the difference").axis(format=".0e", tickCount=4)
    title = "W1 / mean |difference|"
    curves = band_lines(lines, x, title, colour=COLOURS["repeat"], series="values", legend="")
    points = training.rename(columns={"relative_l2": "size"})
    points = points.groupby(["kind", "precision", "step"])[["size", "kept"]].median().reset_index()
    points["pair"] = points["kind"].astype(str) + ", " + points["precision"].astype(str).str.upper()
    marks = (
        alt.Chart(points)
        .mark_point(filled=False, strokeWidth=1.5, color=COLOURS["Flash"])
        .encode(
            x,
            alt.Y("kept:Q").scale(type="log"),
            alt.Shape("pair:N").title(None),
            tooltip=[
                alt.Tooltip("pair:N"),
                alt.Tooltip("step:Q"),
                alt.Tooltip("size:Q").format(".2e").title("relative L2"),
                alt.Tooltip("kept:Q").format(".3f").title(title),
            ],
        )
    )
    small = lines[lines["size"].between(0.9e-2, 1.1e-2)]
    return describe(
        (curves + marks).resolve_scale(shape="independent").properties(width=300),
        f"{title} against the relative size of the difference. Noise of 1e-2: {summary(small, 'values', '.2f')}. "
        f"In training it falls from {points['kept'].max():.2f} to {points['kept'].min():.3f}.",
    )
