"""In which direction does an error that is injected into attention move training?

Drift alone does not tell an error's own effect from amplified noise, and two runs that are displaced from the same
Baseline run look alike for that reason alone. Twins separate the two: see `experiments.systematic`.
"""

from __future__ import annotations

import itertools

import pandas as pd

from fa_study.experiments.law import MODES
from fa_study.experiments.systematic import systematic_effect

_FLASH = "flash"


def effects_of_doses(inner: pd.DataFrame, given: pd.DataFrame) -> pd.DataFrame:
    """The systematic effect of every arm of the dose series, and what every two of them have in common.

    Parameters
    ----------
    inner : table of `systematic.inner_products`. given : `dose.doses`.

    Returns
    -------
    DataFrame : `systematic_effect` of each pair of arms, with a, b (the arms; equal for an arm's own effect), rounding
        and dose (of a). Only steps at which at least one tiled arm has twins; in FP32, in order of rounding and dose.
    """
    own = inner[inner["precision"].astype(str) == "fp32"].astype({"arm": str, "other_arm": str})
    tiled = own[own["arm"].str.startswith("uniform") & (own["twin"] > 0)]
    own = own[own["step"].isin(tiled["step"]) & own["run"].isin(tiled["run"])]
    arms = given.assign(arm=given["variant"].replace("", _FLASH)).sort_values(["rounding", "dose"])
    arms = arms[arms["arm"].isin(set(own["arm"]))].set_index("arm")
    frames = [
        systematic_effect(own, a, None if a == b else b).assign(
            a=a, b=b, rounding=arms.loc[a, "rounding"], dose=arms.loc[a, "dose"]
        )
        for a, b in itertools.combinations_with_replacement(arms.index, 2)
    ]
    frames = [frame for frame in frames if not frame.empty]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["a", "b"])


def arm_name(arm: str) -> str:
    """How a reader knows an arm of the dose series: flash, or uniform e8m7:toward_zero, say, in words."""
    if not arm.startswith("uniform e8m"):
        return arm.capitalize()
    bits, _, rounding = arm.removeprefix("uniform e8m").partition(":")
    return f"{bits} bits {MODES[rounding or 'nearest_even']}"
