"""Drift against the error that attention is given."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.experiments.dose import STEPS
from fa_study.experiments.law import MODES
from fa_study.figures.theme import COLOURS, describe, log_y
from fa_study.figures.weights import spread_over_seeds

_NAMES = {**MODES, "Flash": "Flash kernel, FP32"}
_COLUMNS = 2  # panels in a row, for the sake of phones


def dose_response(response: pd.DataFrame, space: str) -> alt.ConcatChart:
    """Drift over that of ulp twins against the RMS forward error of attention, a panel per step.

    Parameters
    ----------
    response : `experiments.dose.dose_response`. space : "weights" or "predictions".

    Returns
    -------
    alt.ConcatChart : median over the seeds, with smallest and largest as whiskers; shaded, where a further twin lies.
    """
    response = response[(response["space"] == space) & response["step"].isin(STEPS)]
    shown = spread_over_seeds(response, "ratio", ["step", "variant", "rounding", "dose"])
    shown["arm"] = shown["rounding"].map(_NAMES)
    title = f"{space}: drift / drift of ulp twins"
    factors = response.groupby("step")["factor"].median()
    arms = [name for name in _NAMES.values() if name in set(shown["arm"])]
    x = alt.X("dose:Q").scale(type="log").title("RMS error").axis(values=[1e-7, 1e-5, 1e-3], format=".0e")
    dash, shape = (channel("arm:N").scale(domain=arms).title(None) for channel in (alt.StrokeDash, alt.Shape))
    panels = []
    for step, part in shown.groupby("step"):
        first = len(panels) % _COLUMNS == 0
        axis, label = alt.Axis(format=".0e", tickCount=5, labels=first), title if first else ""

        def y(field: str, axis: alt.Axis = axis, label: str = label) -> alt.Y:
            return log_y(field, label).axis(axis)

        twins = pd.DataFrame({"low": [1 / factors[step]], "high": [factors[step]], "median": [1.0]})
        scale = alt.Chart(twins.dropna(axis=1))
        base = alt.Chart(part).encode(x)
        layers = [
            scale.mark_rule(color=COLOURS["ulp twins"], strokeWidth=1.5).encode(y("median")),
            base.mark_rule(color=COLOURS["Flash"], opacity=0.5).encode(y("low"), alt.Y2("high:Q")),
            base.mark_line(color=COLOURS["Flash"], strokeWidth=1).encode(y("median"), dash),
            base.mark_point(color=COLOURS["Flash"], size=60).encode(
                y("median"),
                shape,
                tooltip=[
                    *("arm:N", "variant:N", "seeds:Q"),
                    alt.Tooltip("dose:Q").format(".1e").title("RMS error"),
                    alt.Tooltip("median:Q").format(".3g").title("ratio"),
                ],
            ),
        ]
        if "high" in twins.dropna(axis=1):
            band = scale.mark_rect(color=COLOURS["ulp twins"], opacity=0.25)
            layers.insert(0, band.encode(y("low"), alt.Y2("high:Q")))
        panels.append(alt.layer(*layers).properties(title=f"step {step}", width=115, height=150))
    last = shown[shown["step"] == shown["step"].max()]
    words = "; ".join(f"{row.arm} {row.variant}, error {row.dose:.1e}: {row.median:.3g}" for row in last.itertuples())
    return describe(
        alt.concat(*panels, columns=_COLUMNS, spacing=10).resolve_scale(
            y="shared", shape="shared", strokeDash="shared"
        ),
        f"Drift of the {space} over that of ulp twins against the RMS error of attention. At step "
        f"{shown['step'].max()}: {words}.",
    )
