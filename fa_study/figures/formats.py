"""Figures 3 and 4: the deviation by number format."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from fa_study.experiments.formats import PAPER_FIGURE_3, WIDTHS
from fa_study.experiments.inputs import LABELS
from fa_study.figures.bands import (
    FORMAT_NAMES,
    band_lines,
    format_name,
    positive,
    powers_of_two,
    seed_bands,
    summary,
    tooltips,
)
from fa_study.figures.theme import COLOURS, describe, log_y
from fa_study.formats import parse_format

PAPER = "#666666"


def by_format(frame: pd.DataFrame, title: str) -> alt.LayerChart:
    """Figure 3: max difference between Flash and Baseline in the paper's formats and TF32, with the paper's points.

    Parameters
    ----------
    frame : rows of Flash against Baseline of one family and algorithm; a line per distribution.
    """
    shown = frame[frame["format"].isin(list(FORMAT_NAMES))]
    shown = positive(seed_bands(shown, "max", ["distribution", "format"]))
    shown["inputs"] = shown["distribution"].map(LABELS)
    shown["format"] = shown["format"].map(FORMAT_NAMES)
    x = alt.X("format:N", sort=list(FORMAT_NAMES.values())).title("number format").axis(labelAngle=0)
    lines = band_lines(shown, x, "max difference", colour=COLOURS["Flash"], series="inputs", legend="inputs")
    paper = pd.DataFrame({"format": [format_name(f) for f in PAPER_FIGURE_3], "value": PAPER_FIGURE_3.values()})
    crosses = (
        alt.Chart(paper.assign(source="the paper's Figure 3"))
        .mark_point(shape="cross", size=110, angle=45, filled=True, opacity=1)
        .encode(
            x,
            log_y("value", "max difference"),
            alt.Color("source:N").scale(range=[PAPER]).title(None),
            tooltip=[alt.Tooltip("source:N"), alt.Tooltip("format:N"), alt.Tooltip("value:Q").format(".3e")],
        )
    )
    first = shown[shown["distribution"] == shown["distribution"].iloc[0]]
    return describe(
        (lines + crosses).resolve_scale(color="independent").properties(title=title, width=280),
        f"Max difference between Flash and Baseline by format ({first['inputs'].iloc[0]}): {summary(first, 'format')}.",
    )


def by_width(frame: pd.DataFrame) -> alt.LayerChart:
    """Figure 3, every width from 2 to 24 fraction bits, with the line on which each bit halves the deviation."""
    shown = frame[frame["format"].isin(WIDTHS)]
    shown = positive(seed_bands(shown, "max", ["distribution", "format"]))
    shown["inputs"] = shown["distribution"].map(LABELS)
    shown["bits"] = [parse_format(f).mantissa_bits for f in shown["format"]]
    x = alt.X("bits:Q").title("fraction bits").scale(nice=False, padding=8)
    lines = band_lines(shown, x, "max difference", colour=COLOURS["Flash"], series="inputs", legend="inputs")
    bits = np.arange(2, 25)
    middle = shown.loc[shown["bits"] == 13, "median"].mean()
    guide = pd.DataFrame({"bits": bits, "value": middle * 2.0 ** (13 - bits), "line": "halved by each bit"})
    dashes = (
        alt.Chart(guide)
        .mark_line(strokeDash=[2, 3], strokeWidth=1.5)
        .encode(
            x,
            log_y("value", "max difference"),
            alt.Color("line:N").scale(range=[PAPER]).legend(symbolDash=[2, 3]).title(None),
        )
    )
    ends = shown[shown["bits"].isin([2, 24])]
    text = "; ".join(f"{r.inputs}, {r.bits} bits: {r.median:.2e}" for r in ends.itertuples())
    return describe(
        (lines + dashes).resolve_scale(color="independent").properties(title="every width, e11m2 to e11m24"),
        f"Max difference between Flash and Baseline against the fraction bits. {text}.",
    )


def against_golden(frame: pd.DataFrame, statistic: str, title: str) -> alt.LayerChart:
    """Figure 4: bars of Flash's and Baseline's error against the golden value, per format, the ratio above them.

    Parameters
    ----------
    frame : rows against the golden value of one distribution, family and algorithm.
    statistic : "max" or "rms".
    """
    names = {"max": "max error", "rms": "RMS error"}
    if statistic not in names:
        raise ValueError(f"statistic is one of {', '.join(names)}, got {statistic!r}")
    shown = seed_bands(frame[frame["format"].isin(list(FORMAT_NAMES))], statistic, ["format", "method"])
    shown["format"] = shown["format"].map(FORMAT_NAMES)
    floor = 10.0 ** np.floor(np.log10(shown["low"].min()) - 0.5)
    shown["floor"] = floor
    wide = shown.pivot_table(index="format", columns="method", values="median")
    ratio = pd.DataFrame(
        {"format": wide.index, "top": 2.5 * shown.groupby("format")["high"].max().loc[wide.index].to_numpy()}
    )
    ratio["text"] = [f"× {r:.2g}" for r in wide["Flash"] / wide["Baseline"]]
    x = alt.X("format:N", sort=list(FORMAT_NAMES.values())).title("number format").axis(labelAngle=0)
    top = 10.0 ** np.ceil(np.log10(ratio["top"].max()))

    def y(field: str) -> alt.Y:
        return log_y(field, f"{names[statistic]} against the golden value").scale(type="log", domain=[floor, top])

    offset = alt.XOffset("method:N", sort=["Flash", "Baseline"])
    base = alt.Chart(shown).encode(x, offset)
    bars = base.mark_bar().encode(
        y("median"),
        alt.Y2("floor:Q"),
        alt.Color("method:N", sort=["Flash", "Baseline"])
        .scale(domain=["Flash", "Baseline"], range=[COLOURS["Flash"], COLOURS["Baseline"]])
        .legend(columns=2)
        .title(None),
        tooltip=tooltips("method", "format"),
    )
    whiskers = base.mark_rule(color="black").encode(y("low"), alt.Y2("high:Q"))
    words = alt.Chart(ratio).mark_text(fontSize=12).encode(x, y("top"), text="text:N")
    pairs = "; ".join(f"{row.format}: Flash over Baseline {row.text[2:]}" for row in ratio.itertuples())
    return describe(
        (bars + whiskers + words).properties(title=title, width=280),
        f"{names[statistic]} against the golden value. {pairs}.",
    )


def fp8(frame: pd.DataFrame, value: str) -> alt.LayerChart:
    """Figure 3 in FP8: the share of P that is lost, or the error relative to the output, against the length.

    Parameters
    ----------
    frame : rows of one distribution of the FP8 table.
    value : "flushed" or "error".
    """
    names = {"flushed": "share of P rounded to 0", "error": "RMS error / RMS of the output"}
    if value not in names:
        raise ValueError(f"value is one of {', '.join(names)}, got {value!r}")
    shown = seed_bands(frame.assign(error=frame["rms"] / frame["output_rms"]), value, ["arm", "N"])
    shown["method"] = shown["arm"].str.split(",").str[0]
    shown["inputs"] = np.where(shown["arm"].str.contains("no scales"), "no scales", "with scales")
    order, title = ["Flash", "Baseline"], names[value]

    def y(field: str) -> alt.Y:
        return log_y(field, title) if value == "error" else alt.Y(f"{field}:Q").title(title)

    colour = (
        alt.Color("method:N", sort=order)
        .scale(domain=order, range=[COLOURS[name] for name in order])
        .legend(symbolOpacity=1)
        .title(None)
    )
    dash = alt.StrokeDash("inputs:N", sort=["no scales", "with scales"]).title(None)
    base = alt.Chart(shown).encode(powers_of_two("N", "sequence length N"), colour)
    band = base.mark_area(opacity=0.2).encode(y("low"), alt.Y2("high:Q"), alt.Detail("arm:N"))
    line = base.mark_line().encode(y("median"), dash)
    points = base.mark_point().encode(y("median"), alt.Shape("method:N").legend(None), tooltip=tooltips("arm", "N"))
    last = shown[shown["N"] == shown["N"].max()]
    return describe(
        band + line + points,
        f"{names[value]} at N = {shown['N'].max()}: {summary(last, 'arm')}.",
    )
