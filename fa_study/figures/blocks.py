"""Figure 6: the deviation against the area of a block."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from fa_study.experiments.blocks import by_variant, paired_ratios
from fa_study.figures.bands import band_lines, format_name, positive, powers_of_two, seed_bands, tooltips
from fa_study.figures.theme import COLOURS, describe, log_y


def blocks(frame: pd.DataFrame, variants: Sequence[str], title: str) -> alt.LayerChart:
    """Max difference between Flash and Baseline against Br * Bc; a shape per format, a dash per variant.

    Parameters
    ----------
    frame : rows of Flash against Baseline of one distribution and family.
    variants : of `experiments.blocks.VARIANTS`; the first is drawn solid.
    """
    expanded = by_variant(frame)
    expanded = expanded[expanded["variant"].isin(variants)]
    shown = positive(seed_bands(expanded, "max", ["format", "variant", "Br", "Bc", "area", "T"]))
    shown["format"] = shown["format"].map(format_name)
    shown["series"] = shown["format"] + shown["variant"]
    base = alt.Chart(shown).encode(powers_of_two("area", "block area Br × Bc"))
    y = "max difference"
    band = base.mark_area(color=COLOURS["Flash"], opacity=0.15).encode(
        log_y("low", y), alt.Y2("high:Q"), alt.Detail("series:N")
    )
    dash = (
        alt.StrokeDash("variant:N", sort=list(variants))
        .title("blocks")
        .scale(domain=list(variants), range=[[1, 0], [5, 3], [2, 2]][: len(variants)])
    )
    if len(variants) == 1:
        dash = dash.legend(None)
    line = base.mark_line(color=COLOURS["Flash"]).encode(log_y("median", y), alt.Detail("series:N"), dash)
    points = base.mark_point(color=COLOURS["Flash"]).encode(
        log_y("median", y),
        alt.Shape("format:N", sort=list(dict.fromkeys(shown["format"]))).title("format").legend(columns=2),
        tooltip=tooltips("format", "variant", "Br", "Bc", "area", "T"),
    )
    words = []
    for (fmt, variant), part in shown.groupby(["format", "variant"], sort=False):
        ends = part.sort_values("area")["median"]
        words.append(f"{fmt}, {variant}: {ends.iloc[0]:.2e} to {ends.iloc[-1]:.2e}")
    return describe(
        (band + line + points).properties(title=title),
        f"Max difference from the smallest block to the largest. {'; '.join(words)}.",
    )


def block_ratios(frame: pd.DataFrame, variant: str, title: str) -> alt.LayerChart:
    """The RMS difference with other blocks over that with the published ones, against the fast memory M.

    Parameters
    ----------
    frame : rows of Flash against Baseline of one distribution and family; a line per format.
    variant : of `experiments.blocks.VARIANTS`.
    """
    shown = seed_bands(paired_ratios(frame, variant), "ratio", ["format", "M"]).sort_values(["format", "M"])
    shown["format"] = shown["format"].map(format_name)
    name = "with other blocks / as published"
    chart = band_lines(
        shown,
        powers_of_two("M", "fast memory M, in numbers"),
        name,
        colour=COLOURS["Flash"],
        series="format",
        legend="format",
        log=False,
    )
    largest = shown.groupby("format")["median"].max()
    return describe(
        chart.properties(title=title),
        f"RMS difference with {variant} blocks over that with the published ones, largest median: "
        + "; ".join(f"{fmt} {ratio:.2f}" for fmt, ratio in largest.items())
        + ".",
    )


def rescalings(frame: pd.DataFrame) -> alt.LayerChart:
    """How often a row is rescaled, beside the number of key tiles, against Bc; from the counts of the run."""
    flash = frame[frame["method"] == "Flash"].assign(tiles=lambda f: -(-f["N"] // f["Bc"]) - 1)
    per_Bc = flash.groupby("Bc")[["rescalings", "tiles"]].mean().reset_index()
    names = {"rescalings": "the maximum grew (measured)", "tiles": "tiles after the first: sums rounded"}
    long = per_Bc.melt("Bc", list(names), "what", "count")
    long = long[long["count"] > 0].assign(what=lambda f: f["what"].map(names))
    base = alt.Chart(long).encode(powers_of_two("Bc", "keys per tile Bc"))
    y = alt.Y("count:Q").scale(type="log").title("times per row")
    line = base.mark_line(color=COLOURS["Flash"]).encode(
        y, alt.StrokeDash("what:N", sort=list(names.values())).title(None).legend(labelLimit=320)
    )
    points = base.mark_point(color=COLOURS["Flash"]).encode(
        y,
        alt.Shape("what:N", sort=list(names.values())).legend(None),
        tooltip=[alt.Tooltip("what:N"), alt.Tooltip("Bc:Q"), alt.Tooltip("count:Q").format(".2f")],
    )
    small = per_Bc.iloc[0]
    return describe(
        (line + points).properties(title="rescalings beside tiles"),
        f"At Bc = {small['Bc']:.0f} a row has {small['tiles']:.0f} tiles after the first and its maximum grows "
        f"{small['rescalings']:.1f} times.",
    )
