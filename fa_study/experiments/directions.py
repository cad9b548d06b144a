"""Do two runs whose attention errs in the same way end up displaced in the same direction?

Runs whose perturbations have nothing to do with each other are displaced in directions of their own, until training
has amplified one direction above all others. What an error has in common at two widths of the format, a bias, displaces
both runs alike.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from fa_study.experiments.runs import arm, runs_in
from fa_study.experiments.systematic import prediction_vector, weight_vector
from fa_study.snapshots import snapshot_steps

COLUMNS = ["run", "precision", "seed", "space", "step", "a", "b", "cosine"]
# The widths whose runs are compared, of each rounding.
WIDTHS = ("uniform e8m10", "uniform e8m7")
_PLACE = ["seed", "space", "step"]


def _families(folder: Path) -> dict[str, dict[str, Path]]:
    """{settings: {"Baseline", "Flash", "twin 1", ... or the arm: run}} of runs that differ in their attention alone.

    Twins are Baseline's. Only where Baseline stands beside two tiled arms or more; without dropped weights.
    """
    families: dict[str, dict[str, Path]] = defaultdict(dict)
    for run, settings in runs_in(folder).items():
        name, twin, attn = arm(settings), settings.pop("twin"), settings.pop("attn")["name"]
        if settings["twin_step"] or not (run / "weights").exists() or (twin and attn != "baseline"):
            continue
        label = f"twin {twin}" if twin else {"baseline": "Baseline", "flash": "Flash"}.get(attn, name)
        families[repr(settings)][label] = run
    return {
        key: members
        for key, members in families.items()
        if "Baseline" in members and sum(label.startswith("uniform") for label in members) >= 2
    }


def displacement_cosines(folder: Path) -> pd.DataFrame:
    """Cosine between the displacements from Baseline of every two runs that differ from it in their attention alone.

    A displacement is a run's weights, or predictions, minus those of the Baseline run at the same step. Parameters
    whose exact gradient is zero are left out.

    Returns
    -------
    DataFrame : a row per (run, precision, seed, space, step, a, b): cosine; run names the Baseline run, a and b are
        tiled arms, "Flash" or "twin 1", "twin 2", ...; runs that are not displaced at a step are left out there.
    """
    rows = []
    for members in _families(folder).values():
        baseline = members.pop("Baseline")
        _, precision, rest = baseline.name.split("-", 2)
        seed = int(rest.split("-")[1].removeprefix("s"))
        for space, flatten in (("weights", weight_vector), ("predictions", prediction_vector)):
            for step in sorted(set.intersection(*(set(snapshot_steps(run)) for run in [baseline, *members.values()]))):
                vectors = {label: flatten(run, step) for label, run in members.items()}
                origin = flatten(baseline, step)
                if origin is None or any(vector is None for vector in vectors.values()):
                    continue
                moved = {label: vector - origin for label, vector in sorted(vectors.items())}
                lengths = {label: np.linalg.norm(vector) for label, vector in moved.items()}
                for a, b in itertools.combinations([label for label in moved if lengths[label]], 2):
                    cosine = float(moved[a] @ moved[b] / (lengths[a] * lengths[b]))
                    rows.append((baseline.name, precision, seed, space, step, a, b, cosine))
    return pd.DataFrame(rows, columns=COLUMNS)


def shared_direction(cosines: pd.DataFrame) -> pd.DataFrame:
    """The cosine between two widths of each rounding, beside those of runs that have nothing in common.

    Nothing in common has every pair with an ulp twin or with Flash in it. All pairs share the Baseline run that they
    are displaced from, which makes for a cosine of 1/2 between independent runs once drift is saturated.

    Returns
    -------
    DataFrame : rounding, seed, space, step, cosine, pairs (with nothing in common), low and high (the smallest and
        largest of their cosines).
    """
    cosines = cosines.astype({"a": str, "b": str, "space": str})
    unrelated = cosines["a"].str.match("twin|Flash") | cosines["b"].str.match("twin|Flash")
    scale = cosines[unrelated].groupby(_PLACE)["cosine"].agg(pairs="count", low="min", high="max")
    parts = []
    for rounding, mark in (("nearest_even", ""), ("stochastic", ":stochastic"), ("toward_zero", ":toward_zero")):
        widths = [width + mark for width in WIDTHS]
        part = cosines[cosines["a"].isin(widths) & cosines["b"].isin(widths)]
        parts.append(part[[*_PLACE, "cosine"]].assign(rounding=rounding))
    return pd.concat(parts).merge(scale.reset_index(), on=_PLACE)
