"""The book's answer in one picture, for the README and the title page: the error of one pass, the drift of training."""

from __future__ import annotations

from pathlib import Path

import altair as alt
import pandas as pd
import vl_convert

from fa_study.figures.bands import band_lines, powers_of_two
from fa_study.figures.theme import COLOURS, describe, register_theme
from fa_study.figures.weights import weight_differences

# Family of policies -> what a reader is told.
_FAMILIES = {"uniform": "every intermediate in BF16, as in the paper", "kernel": "what real kernels round"}
TABLES = ("ten_times.parquet", "ten_times_trained.parquet", "weights.parquet")


def error_over_tiles(ratios: pd.DataFrame) -> alt.LayerChart:
    """Error of Flash over that of Baseline against the number of key tiles, by what is rounded.

    Parameters
    ----------
    ratios : rows of `experiments.ten_times.ratios` in BF16. The line is the median over inputs, sizes and algorithms of
        the medians over the seeds, the band runs from the smallest to the largest of them.
    """
    keys = ["family", "distribution", "N", "D", "algorithm", "Bc"]
    medians = ratios.groupby(keys)["ratio"].median().reset_index()
    medians["T"] = medians["N"] // medians["Bc"]
    grouped = medians.groupby(["family", "T"])["ratio"]
    shown = grouped.agg(median="median", low="min", high="max", seeds="count").reset_index()
    shown["what"] = shown["family"].map(_FAMILIES)
    y = "RMS error of Flash / that of Baseline"
    lines = band_lines(
        shown, powers_of_two("T", "key tiles, N / Bc"), y, colour=COLOURS["Flash"], series="what", legend=""
    )
    marks = pd.DataFrame({"median": [1.0, 10.0], "words": ["Baseline's error", "the paper's ten times"]})
    domain = [shown["low"].min() / 1.2, shown["high"].max() * 1.2]
    base = alt.Chart(marks).encode(alt.Y("median:Q").scale(type="log", nice=False, domain=domain).axis(format="~g"))
    rules = base.mark_rule(strokeDash=[4, 3])
    words = base.mark_text(align="left", baseline="top", fontSize=11, dx=4, dy=3).encode(x=alt.value(0), text="words:N")
    ends = {f: part.loc[part["T"].idxmax()] for f, part in shown.groupby("family")}
    return describe(
        (rules + words + lines).properties(title="One pass of attention in BF16"),
        f"{y}, medians: "
        + "; ".join(f"{_FAMILIES[f]} {end['median']:.2g} at {end['T']} tiles" for f, end in ends.items())
        + ".",
    )


def answer_picture(ratios: pd.DataFrame, drift: pd.DataFrame) -> alt.HConcatChart:
    """Both halves of the answer side by side.

    Parameters
    ----------
    ratios : see `error_over_tiles`.
    drift : rows of `weight_differences`: Flash against Baseline, and the ulp twins.
    """
    left = error_over_tiles(ratios)
    right = weight_differences(drift, "relative_l2").properties(title="Weights over training")
    text = " ".join(chart.usermeta["alt"] for chart in (left, right))
    # Only a whole picture can have the text: the halves give theirs up.
    for chart in (left, right):
        chart.usermeta = alt.Undefined
    both = alt.hconcat(left, right, spacing=40)
    return describe(both.resolve_scale(color="independent", shape="independent", strokeDash="independent"), text)


def write_svg(chart: alt.TopLevelMixin, path: Path, *, sources: dict[str, str]) -> None:
    """Write a chart as an SVG file on a white card, with the sha256 of the tables that it was drawn from.

    Parameters
    ----------
    sources : table -> sha256, so that a test can see whether the file is older than its tables.
    """
    register_theme()
    spec = chart.properties(padding=16).to_dict()
    svg = vl_convert.vegalite_to_svg(spec, vl_version="6.4")
    text = spec["usermeta"]["alt"].replace("&", "&amp;").replace("<", "&lt;")
    start, _, rest = svg.partition(">")
    lines = "".join(f"\n{name} {digest}" for name, digest in sources.items())
    path.write_text(f"{start}><title>{text}</title><!--{lines}\n-->{rest}\n")
