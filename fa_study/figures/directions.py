"""What injected errors of attention make of training beyond scatter, and which of them lead to the same place."""

from __future__ import annotations

import altair as alt
import pandas as pd

from fa_study.experiments.directions import arm_name
from fa_study.figures.theme import COLOURS, describe

# (on a dark cell, told from zero) -> colour of the letters
_INKS = {(False, False): "#6e6e6e", (False, True): "black", (True, False): "#cfcfcf", (True, True): "white"}


def shared_effects(effects: pd.DataFrame, space: str, *, level: float = 0.01) -> alt.ConcatChart:
    """A table of shares, arm by arm and a panel per step: on the diagonal what an arm's own twins have in common.

    Parameters
    ----------
    effects : `experiments.directions.effects_of_doses`. space : "weights" or "predictions".
    level : shares with a larger p are printed in grey.
    """
    shown = effects[(effects["space"] == space) & (effects["step"] > 0)]
    order = [arm_name(arm) for arm in dict.fromkeys(shown["a"])]
    shown = shown.assign(
        row=shown["b"].map(arm_name),
        column=shown["a"].map(arm_name),
        text=[f"{share:.0%}".replace("-0%", "0%").replace("-", "−") for share in shown["share"]],
        ink=[_INKS[row.share > 0.5, row.p < level] for row in shown.itertuples()],
    )
    panels = []
    for step, part in shown.groupby("step"):
        base = alt.Chart(part).encode(
            alt.X("column:N").sort(order).title(None).axis(labelAngle=-90, domain=False, ticks=False),
            alt.Y("row:N").sort(order).title(None).axis(domain=False, ticks=False, labelLimit=140),
        )
        cells = base.mark_rect(stroke="white").encode(
            alt.Color("share:Q").scale(domain=[0, 1], range=["#f4f4f4", COLOURS["tiled"]], clamp=True).legend(None),
            tooltip=[
                *("row:N", "column:N", "twins:Q"),
                alt.Tooltip("share:Q").format(".1%"),
                alt.Tooltip("p:Q").format(".2g"),
                alt.Tooltip("detectable:Q").format(".1%").title("share found 4 times of 5"),
            ],
        )
        # The cells' own descriptions tell a screen reader the same.
        words = base.mark_text(fontSize=9, aria=False).encode(
            alt.Text("text:N"),
            alt.Color("ink:N", legend=None).scale(None),
        )
        layers = (cells + words).resolve_scale(color="independent")
        panels.append(layers.properties(title=f"{space}, step {step}", width=alt.Step(28), height=alt.Step(24)))
    first = shown[shown["step"] == shown["step"].min()]
    own = "; ".join(f"{row.row} {row.text}" for row in first[first["a"] == first["b"]].itertuples())
    return describe(
        alt.concat(*panels, columns=1),
        f"Share of the squared distance of the {space} from Baseline that all twins of an arm, or of two arms, have in "
        f"common. At step {first['step'].min()}, of an arm's own twins: {own}.",
    )
