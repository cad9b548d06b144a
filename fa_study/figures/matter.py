"""Does it matter? Held-out losses beside each other, the loss between two runs, and their samples."""

from __future__ import annotations

import base64
import html

import altair as alt
import numpy as np
import pandas as pd
from IPython.display import HTML

from fa_study.experiments.matter import MARGIN
from fa_study.figures.theme import describe
from fa_study.figures.weights import KIND_COLOURS, spread_over_seeds

_ARMS = {("baseline", 0): "Baseline", ("flash", 0): "Flash", ("baseline", 1): "Baseline, nudged"}
_PICTURE = "width:100%;image-rendering:pixelated"
_GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:12px 24px;width:46rem;max-width:100%"


def _colour(kinds: pd.Series) -> alt.Color:
    present = [kind for kind in KIND_COLOURS if kind in set(kinds)]
    colours = [KIND_COLOURS[kind] for kind in present]
    return alt.Color("kind:N", sort=present).scale(domain=present, range=colours).title(None)


def loss_ratio(ratios: pd.DataFrame) -> alt.LayerChart:
    """Held-out loss of one run over that of the other, a row per kind: geometric mean, its interval, and the spread.

    The pale bar reaches one standard deviation of single pairs to both sides of the mean; of two initialisations, whose
    ratio has no mean to speak of, to both sides of 1. Within the grey band, of `MARGIN`, losses count as equal.

    Parameters
    ----------
    ratios : `experiments.matter.loss_ratios`; with a column which, rows in which it is "fresh" are named so.
    """
    within = ~ratios["kind"].str.contains("FP32")
    precision = ratios["precision"].str.removesuffix("_emulated").str.upper()
    data = ratios.assign(pair=ratios["kind"].where(~within, ratios["kind"] + ", " + precision))
    fresh = data["which"].eq("fresh") if "which" in data else pd.Series(False, index=data.index)
    data["pair"] += fresh.map({True: ", fresh", False: ""})
    middle = data["centre"].fillna(1)
    data = data.assign(left=middle * np.exp(-data["spread"]), right=middle * np.exp(data["spread"]))
    order = [kind for kind in KIND_COLOURS if kind in set(data["kind"])]
    data = data.assign(place=data["kind"].map(order.index), late=~fresh).sort_values(["place", "precision", "late"])
    y = alt.Y("pair:N", sort=data["pair"].tolist()).title(None).axis(labelLimit=260)
    colour = _colour(data["kind"]).legend(None)
    base = alt.Chart(data).encode(
        y,
        colour,
        tooltip=[
            *("pair:N", "seeds:Q"),
            *(alt.Tooltip(f"{name}:Q").format(".3f") for name in ("centre", "low", "high", "detectable", "spread")),
        ],
    )
    x = alt.Scale(type="log", nice=False, padding=10)
    title = "ratio of the held-out losses"
    axis = alt.Axis(format=".2f", values=[0.8, 0.9, 1, 1.1, 1.2], labelOverlap=True)
    spread = base.mark_bar(height=10, fillOpacity=0.25).encode(
        alt.X("left:Q", scale=x, title=title, axis=axis), alt.X2("right:Q")
    )
    told = base.transform_filter("isValid(datum.centre)")
    rules = told.mark_rule(strokeWidth=2).encode(alt.X("low:Q", scale=x), alt.X2("high:Q"))
    points = told.mark_point(size=70, opacity=1).encode(alt.X("centre:Q", scale=x))
    marks = alt.Chart(pd.DataFrame({"one": [1], "below": [1 / (1 + MARGIN)], "above": [1 + MARGIN]}))
    equal = marks.mark_rect(color="#dddddd", opacity=0.6).encode(alt.X("below:Q", scale=x), alt.X2("above:Q"))
    one = marks.mark_rule(color="black", strokeDash=[4, 3]).encode(alt.X("one:Q", scale=x))
    words = "; ".join(
        f"{row.pair}: "
        + (
            f"spread {row.spread:.1%}"
            if np.isnan(row.centre)
            else f"{row.centre:.3f} ({row.low:.3f} to {row.high:.3f})"
        )
        for row in data.itertuples()
    )
    return describe(
        (equal + spread + one + rules + points).properties(width=210), f"Ratio of held-out losses. {words}."
    )


def line_losses(lines: pd.DataFrame) -> alt.LayerChart:
    """Held-out loss along the straight line between two runs: median over the seeds, smallest to largest as band.

    Parameters
    ----------
    lines : `experiments.matter.lines`, averaged over their batches here.
    """
    means = lines.groupby(["kind", "precision", "seed", "alpha"], as_index=False)["loss"].mean()
    data = spread_over_seeds(means, "loss", ["kind", "precision", "alpha"])
    data["precision"] = data["precision"].str.upper()
    base = alt.Chart(data).encode(
        alt.X("alpha:Q").title("share of the second run's weights").axis(tickCount=6), _colour(data["kind"])
    )
    scale = alt.Scale(type="log", nice=False, padding=8)
    band = base.mark_area(opacity=1, fillOpacity=0.2).encode(
        alt.Y("low:Q", scale=scale), alt.Y2("high:Q"), alt.Detail(["kind:N", "precision:N"])
    )
    line = base.mark_line(point=True).encode(
        alt.Y("median:Q", scale=scale).title("held-out loss").axis(format="~g", tickCount=5),
        alt.StrokeDash("precision:N").title(None).legend(symbolType="stroke"),
        tooltip=[*("kind:N", "precision:N", "alpha:Q"), alt.Tooltip("median:Q").format(".4f"), "seeds:Q"],
    )
    middle = data[(data["alpha"] - 0.5).abs() < 0.01]
    words = "; ".join(f"{row.kind}, {row.precision}: {row.median:.3f}" for row in middle.itertuples())
    return describe(band + line, f"Held-out loss on the line between two runs. In the middle, {words}.")


def sample_rows(strips: pd.DataFrame) -> HTML:
    """The samples of the arms below each other, for each precision and seed.

    Parameters
    ----------
    strips : `experiments.matter.sample_strips`.
    """
    cells = []
    for (precision, seed), part in strips.groupby(["precision", "seed"], observed=True):
        cells.append(f"<div><strong>{html.escape(precision.upper())}, seed {seed}</strong>")
        by_arm = {(row.arm, row.twin): row.png for row in part.itertuples()}
        for arm, name in _ARMS.items():
            if arm in by_arm:
                data = base64.b64encode(by_arm[arm]).decode()
                alt_text = f"Samples of {name} in {precision.upper()}, seed {seed}"
                picture = f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt_text)}" style="{_PICTURE}">'
                cells.append(f"<div>{name}<br>{picture}</div>")
        cells.append("</div>")
    return HTML(f'<div style="{_GRID}">' + "\n".join(cells) + "</div>")
