"""Charts of the biased rounding, the limits of its remedy, and the running sum that stalls."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from fa_study.experiments.published import biased_rounding
from fa_study.figures.bands import band_lines, powers_of_two, seed_bands, summary, tooltips
from fa_study.figures.theme import COLOURS, describe, log_y

# The arms of the bias experiment: what has a meaning elsewhere in the book keeps its colour.
_ARM_COLOURS = dict(
    zip(biased_rounding.ARMS, (COLOURS["low precision"], COLOURS["data order"], COLOURS["repeat"], COLOURS["Flash"]))
)


def signed_errors(frame: pd.DataFrame, value: str, title: str) -> alt.LayerChart:
    """Signed mean error in units of u by the weight of the other keys: median and 5th to 95th percentile.

    Parameters
    ----------
    frame : rows of the bias table with one kind of values and one number of repeats.
    value : "mean" (the output), "delta_output" or "delta_probabilities".
    """
    shown = seed_bands(frame, value, ["arm", "rest"])
    shown["weight"] = shown["rest"].map("{:g}".format)
    arms = list(_ARM_COLOURS)
    base = alt.Chart(shown).encode(
        alt.X("weight:N", sort=None).title("weight of all other keys").axis(labelAngle=0),
        alt.XOffset("arm:N", sort=arms),
        alt.Color("arm:N", sort=arms).scale(domain=arms, range=list(_ARM_COLOURS.values())).title(None),
    )
    y = alt.Y("median:Q").title("signed mean error / u").scale(domain=[-0.4, 0.4], clamp=True)
    points = base.mark_point().encode(
        y, alt.Shape("arm:N", sort=arms).scale(domain=arms).title(None), tooltip=tooltips("arm", "weight")
    )
    whiskers = base.mark_rule().encode(alt.Y("low:Q"), alt.Y2("high:Q"))
    zero = alt.Chart(pd.DataFrame({"median": [0.0]})).mark_rule(strokeWidth=0.5).encode(alt.Y("median:Q"))
    small = shown[shown["rest"] == 1e-3]
    return describe(
        (zero + whiskers + points).properties(title=title, width=280),
        f"{title}: signed mean error in units of u where the other keys weigh 0.001: {summary(small, 'arm', '.2g')}.",
    )


def shift_limits(frame: pd.DataFrame) -> alt.LayerChart:
    """Relative error of a row against its maximum under the shift, a line per beta; it ends where no number is left."""
    shown = frame[(frame["error"] > 0) & (frame["error"] < np.inf)].assign(beta=frame["beta"].map("{:g}".format))
    base = alt.Chart(shown).encode(
        alt.X("maximum:Q").title("the repeated maximum"),
        log_y("error", "relative error of the output"),
        alt.StrokeDash("beta:N").title("β"),
    )
    marks = pd.DataFrame({"maximum": [biased_rounding.predicted_limit(b) for b in sorted(frame["beta"].unique())]})
    rules = (
        alt.Chart(marks.assign(source="where exp((1 − β) m) leaves normal FP32"))
        .mark_rule(strokeDash=[2, 3], strokeWidth=1.5)
        .encode(
            alt.X("maximum:Q"),
            alt.Color("source:N")
            .scale(range=["#666666"])
            .legend(symbolDash=[2, 3], symbolType="stroke", labelLimit=320)
            .title(None),
        )
    )
    ends = biased_rounding.limits(frame)["fails from"]
    return describe(
        (base.mark_line(color=COLOURS["Flash"]) + rules).properties(title="all in FP32, with the shift"),
        "The output is no number from these maxima on: "
        + "; ".join(f"beta {b:g}: {m:g}" for b, m in ends.items())
        + ".",
    )


def stalled_sums(frame: pd.DataFrame, scores: str) -> alt.LayerChart:
    """The row sum over its true value against N, for ways of rounding and tiles of 1 and 16 keys."""
    part = frame[(frame["scores"] == scores) & (frame["site"] == "sum") & frame["Bc"].isin([1, 16])]
    shown = seed_bands(part, "sum", ["rounding", "Bc", "N"])
    names = {"bf16": "BF16", "fp16": "FP16", "bf16:stochastic": "BF16, stochastic"}
    shown["how"] = [
        f"{names[r.rounding]}, {'key by key' if r.Bc == 1 else '16 keys at a time'}" for r in shown.itertuples()
    ]
    shown = shown[~((shown["rounding"] == "fp16") & (shown["Bc"] == 16))]
    lines = band_lines(
        shown,
        powers_of_two("N", "number of keys N"),
        "row sum / true row sum",
        colour=COLOURS["Flash"],
        series="how",
        legend="sum kept in",
    )
    last = shown[shown["N"] == 4096]
    return describe(
        lines.properties(title=f"{scores} scores"),
        f"Row sum over its true value at N = 4096, {scores} scores: {summary(last, 'how', '.3g')}.",
    )
