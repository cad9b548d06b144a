"""Speed: each measured ratio to a peer beside the bar that the project set itself before measuring."""

from __future__ import annotations

import re
import textwrap
from fractions import Fraction

import altair as alt
import pandas as pd

from fa_study.figures.theme import COLOURS, describe

_BAR = re.compile(r"(at most|at least) ([\d./]+)")
_LINE = 62  # letters of a benchmark's name on one line


def beside_bars(table: pd.DataFrame) -> pd.DataFrame:
    """The measurements that have a bar, with the bar as a number.

    Parameters
    ----------
    table : the stored table of `make bench`, whose column `bar` is text such as "at most 1/25 = 0.04" or "none".

    Returns
    -------
    DataFrame : the rows with a bar, and `limit`; `share`, the ratio over its limit (the limit over the ratio where
        more is better), so that at most 1 is within the bar; and `result`, "met" or "missed".
    """
    found = table["bar"].map(_BAR.match)
    shown = table[found.notna()].copy()
    shown["limit"] = [float(Fraction(match[2])) for match in found.dropna()]
    more = [match[1] == "at least" for match in found.dropna()]
    share = shown["ratio"] / shown["limit"]
    shown["share"] = share.where(~pd.Series(more, index=shown.index), 1 / share)
    shown["result"] = shown["share"].le(1).map({True: "met", False: "missed"})
    return shown


def speed(table: pd.DataFrame, topic: str) -> alt.LayerChart:
    """A row per benchmark of one topic: how far it stays within its bar, or goes beyond.

    Parameters
    ----------
    table : `beside_bars`. A share of 0 has no place on the logarithmic axis and is left out.
    """
    shown = table[(table["topic"] == topic) & (table["share"] > 0)].sort_values("share", ascending=False)
    shown = shown.assign(
        row=range(len(shown)), bar_end=1.0, words=[textwrap.wrap(name, _LINE) for name in shown["benchmark"]]
    )
    results = ["met", "missed"]
    colours = alt.Scale(domain=results, range=[COLOURS["initialisation"], COLOURS["Baseline"]])
    y = alt.Y("row:O", axis=None).scale(paddingInner=0, paddingOuter=0)
    x = (
        alt.X("share:Q")
        .scale(type="log", domain=[0.05, 4], nice=False)
        .title("measured ratio / its bar; up to 1 is met")
    )
    base = alt.Chart(shown).encode(y)
    # Once in white below, so that the grid does not run through the letters. Further lines go down from the first.
    names = [
        base.transform_filter(f"datum.words.length == {lines}")
        .mark_text(align="left", baseline="bottom", fontSize=11, aria=False, **border)
        .encode(x=alt.value(0), text="words:N", yOffset=alt.value(25 - 13 * (lines - 1)))
        for border in ({"stroke": "white", "strokeWidth": 4}, {})
        for lines in (1, 2)
    ]
    colour = alt.Color("result:N").title(None).scale(colours).legend(columns=2)
    sticks = base.mark_rule(strokeWidth=3).encode(x, alt.X2("bar_end:Q"), colour, yOffset=alt.value(35))
    points = base.mark_point(size=70, filled=True, opacity=1).encode(
        x.axis(values=[0.05, 0.1, 0.2, 0.5, 1, 2, 4], format="~g", grid=True),
        colour,
        alt.Shape("result:N").title(None).scale(domain=results, range=["circle", "diamond"]),
        tooltip=[
            alt.Tooltip("benchmark:N"),
            alt.Tooltip("ratio:Q").format(".3g"),
            alt.Tooltip("bar:N"),
            alt.Tooltip("share:Q").format(".2f").title("ratio / bar"),
        ],
        yOffset=alt.value(35),
    )
    bar = alt.Chart(pd.DataFrame({"share": [1.0]})).mark_rule(strokeDash=[4, 3]).encode(alt.X("share:Q"))
    return describe(
        alt.layer(bar, sticks, points, *names).properties(title=topic, width=310, height=alt.Step(44)),
        f"{topic}, measured ratio over its bar: "
        + "; ".join(f"{r.benchmark} {r.share:.2f}, {r.result}" for r in shown.itertuples())
        + ".",
    )
