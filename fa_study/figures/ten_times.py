"""When is it ten times? Heat maps of Flash's error over Baseline's, and the control without rescaling."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import numpy as np
import pandas as pd

from fa_study.experiments.control import ARMS
from fa_study.figures.bands import seed_bands, tooltips
from fa_study.figures.theme import COLOURS, describe


def contour(table: pd.DataFrame, level: float) -> pd.DataFrame:
    """The edges between cells below `level` and cells at or above it.

    Parameters
    ----------
    table : values with rows and columns in drawing order.

    Returns
    -------
    DataFrame : x, y, x2, y2 of each edge in cells, the origin at the upper left corner of the table.
    """
    above = table.to_numpy() >= level
    rows, columns = above.shape
    edges = [
        (j + 1, i, j + 1, i + 1) for i in range(rows) for j in range(columns - 1) if above[i, j] != above[i, j + 1]
    ]
    edges += [
        (j, i + 1, j + 1, i + 1) for i in range(rows - 1) for j in range(columns) if above[i, j] != above[i + 1, j]
    ]
    return pd.DataFrame(edges, columns=["x", "y", "x2", "y2"])


def heat_map(ratios: pd.DataFrame, title: str, *, level: float = 10.0) -> alt.LayerChart:
    """Median ratio of Flash's error to Baseline's over N and Bc, with the contour of `level`.

    Parameters
    ----------
    ratios : rows of `experiments.ten_times.ratios` of one distribution, format, algorithm and D.
    """
    shown = seed_bands(ratios, "ratio", ["N", "Bc"])
    table = shown.pivot_table(index="Bc", columns="N", values="median").sort_index()
    place = {N: j for j, N in enumerate(table.columns)}, {Bc: i for i, Bc in enumerate(table.index)}
    shown = shown.assign(
        x=shown["N"].map(place[0]),
        y=shown["Bc"].map(place[1]),
        text=[f"{r:.0f}" if r >= 9.95 else f"{r:.1f}" for r in shown["median"]],
        # Black letters have more contrast than white ones on all but the darkest blue.
        light=shown["median"] < 12,
    )
    shown["x2"], shown["y2"] = shown["x"] + 1, shown["y"] + 1
    shown["xm"], shown["ym"] = shown["x"] + 0.5, shown["y"] + 0.5

    def axis(values: Sequence[int]) -> alt.Axis:
        names = {0.5 + i: f"{v // 1024}k" if v >= 1024 else str(v) for i, v in enumerate(values)}
        label = " : ".join(f"datum.value == {at} ? '{name}'" for at, name in names.items()) + " : ''"
        return alt.Axis(values=list(names), labelExpr=label, grid=False, ticks=False, domain=False)

    x_scale, y_scale = alt.Scale(domain=[0, len(place[0])]), alt.Scale(domain=[0, len(place[1])], reverse=True)

    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", scale=x_scale, axis=axis(list(place[0]))).title("sequence length N")

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", scale=y_scale, axis=axis(list(place[1]))).title("keys per tile Bc")

    base = alt.Chart(shown)
    cells = base.mark_rect(stroke="white").encode(
        x("x"),
        y("y"),
        alt.X2("x2:Q"),
        alt.Y2("y2:Q"),
        # Blue where Flash errs more, orange-red where Baseline does: the colours of the two through the book.
        alt.Color("median:Q")
        .scale(type="log", domain=[1 / 16, 1, 16], range=[COLOURS["Baseline"], "#f4f4f4", COLOURS["Flash"]], clamp=True)
        .legend(None),
        tooltip=tooltips("N", "Bc", number=".3g"),
    )
    # The cells' own descriptions tell a screen reader the same.
    words = base.mark_text(fontSize=11, aria=False).encode(
        x("xm"),
        y("ym"),
        alt.Text("text:N"),
        alt.Color("light:N", legend=None).scale(domain=[True, False], range=["black", "white"]),
    )
    edges = (
        alt.Chart(contour(table, level))
        .mark_rule(strokeWidth=3, color="black", aria=False)
        .encode(x("x"), y("y"), alt.X2("x2:Q"), alt.Y2("y2:Q"))
    )
    largest = shown.loc[shown["median"].idxmax()]
    count = int((shown["median"] >= level).sum())
    return describe(
        (cells + words + edges).resolve_scale(color="independent").properties(title=title, width=280, height=200),
        f"Error of Flash over that of Baseline by N and Bc: at least {level:g} in {count} of {len(shown)} cells, "
        f"largest {largest['median']:.1f} at N = {largest['N']}, Bc = {largest['Bc']}.",
    )


def control(frame: pd.DataFrame, title: str) -> alt.LayerChart:
    """Bars of the error of every arm of the control, in units of u times the RMS of the output.

    Parameters
    ----------
    frame : rows of one distribution, format, N and Bc.
    """
    shown = seed_bands(frame.assign(error=frame["rms"] / frame["unit"]), "error", ["arm"])
    shown["meaning"] = np.where(shown["arm"] == "Baseline", "Baseline", "Flash")
    shown.loc[shown["arm"].str.startswith("slabs"), "meaning"] = "Baseline in slabs, no rescaling"
    shown["what"] = shown["arm"].map(ARMS)
    y = alt.Y("arm:N", sort=list(ARMS)).title(None).axis(labelLimit=200)
    meanings = ["Baseline", "Baseline in slabs, no rescaling", "Flash"]
    base = alt.Chart(shown).encode(y)
    bars = base.mark_bar().encode(
        alt.X("median:Q").title("RMS error / (u × RMS of the output)"),
        alt.Color("meaning:N", sort=meanings)
        .scale(domain=meanings, range=[COLOURS["Baseline"], "#F0B48C", COLOURS["Flash"]])
        .legend(labelLimit=320)
        .title(None),
        tooltip=tooltips("arm", "what", number=".3g"),
    )
    whiskers = base.mark_rule(color="black").encode(alt.X("low:Q"), alt.X2("high:Q"))
    return describe(
        (bars + whiskers).properties(title=title, width=220, height=190),
        "RMS errors in units of u: " + "; ".join(f"{r.arm} {r.median:.2f}" for r in shown.itertuples()) + ".",
    )
