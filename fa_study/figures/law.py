"""The law: the error of Flash against the number of key tiles, for three ways of rounding."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from fa_study.experiments.law import MODES, prediction
from fa_study.figures.bands import positive, powers_of_two, seed_bands, tooltips
from fa_study.figures.theme import COLOURS, describe, log_y


def law(frame: pd.DataFrame, title: str, *, predicted: bool = True) -> alt.LayerChart:
    """RMS error in units of u times the output's RMS against T, with the prediction dotted.

    Parameters
    ----------
    frame : rows of one algorithm, distribution and way of varying T.
    """
    shown = positive(seed_bands(frame.assign(error=frame["rms"] / frame["unit"]), "error", ["rounding", "T"]))
    shown["mode"] = shown["rounding"].map(MODES)
    order = list(MODES.values())
    x, y = powers_of_two("T", "key tiles T = N / Bc"), "RMS error / (u × RMS of output)"
    base = alt.Chart(shown).encode(x)
    dash = alt.StrokeDash("mode:N", sort=order).title("rounding")
    layers = [
        base.mark_area(color=COLOURS["Flash"], opacity=0.2).encode(
            log_y("low", y), alt.Y2("high:Q"), alt.Detail("mode:N")
        ),
        base.mark_line(color=COLOURS["Flash"]).encode(log_y("median", y), dash),
        base.mark_point(color=COLOURS["Flash"]).encode(
            log_y("median", y),
            alt.Shape("mode:N", sort=order).legend(None),
            tooltip=tooltips("mode", "T", number=".3g"),
        ),
    ]
    if predicted:
        T = np.array(sorted(shown["T"].unique()))
        lines = pd.concat(
            pd.DataFrame({"T": T, "value": prediction(T, mode), "mode": mode, "line": "predicted, nothing fitted"})
            for mode in MODES
        )
        layers.append(
            alt.Chart(lines)
            .mark_line(strokeDash=[1, 3], strokeWidth=1.5)
            .encode(
                x,
                log_y("value", y),
                alt.Detail("mode:N"),
                alt.Color("line:N").scale(range=["black"]).legend(symbolDash=[1, 3]).title(None),
            )
        )
    last = shown[shown["T"] == shown["T"].max()]
    return describe(
        alt.layer(*layers).resolve_scale(color="independent").properties(title=title),
        f"RMS error in units of u at T = {shown['T'].max()}: "
        + "; ".join(f"{r.mode} {r.median:.3g}" for r in last.itertuples())
        + ".",
    )


def bias(shares: pd.DataFrame, title: str) -> alt.LayerChart:
    """Share of the mean squared error that is bias, against T.

    Parameters
    ----------
    shares : rows of `experiments.law.bias_share` of one algorithm, distribution and way of varying T.
    """
    shown = shares.assign(mode=shares["rounding"].map(MODES))
    order = list(MODES.values())
    y = alt.Y("share:Q").title("bias² / mean squared error").scale(domain=[0, 1])
    base = alt.Chart(shown).encode(powers_of_two("T", "key tiles T = N / Bc"), y)
    line = base.mark_line(color=COLOURS["Flash"]).encode(alt.StrokeDash("mode:N", sort=order).title("rounding"))
    points = base.mark_point(color=COLOURS["Flash"]).encode(
        alt.Shape("mode:N", sort=order).legend(None),
        tooltip=[alt.Tooltip("mode:N"), alt.Tooltip("T:Q"), alt.Tooltip("share:Q").format(".3f")],
    )
    last = shown[shown["T"] == shown["T"].max()]
    return describe(
        (line + points).properties(title=title),
        f"Share of bias in the mean squared error at T = {shown['T'].max()}: "
        + "; ".join(f"{r.mode} {r.share:.2f}" for r in last.itertuples())
        + ".",
    )
