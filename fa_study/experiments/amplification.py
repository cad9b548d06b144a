"""How fast training amplifies a difference between two runs, where it ends, and what of Flash's drift that explains.

A difference too small to matter grows by a steady factor per step until the two runs have nothing in common but what
every run has; from there on it no longer depends on how small it was.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fa_study.experiments.intervals import detectable_ratio, log_ratio_interval
from fa_study.experiments.weights import whole_model

FLASH, TWIN = "Flash against Baseline", "ulp twin"
KINDS = [FLASH, TWIN, "BF16 against FP32", "FP16 against FP32"]
SATURATED = 1 / 3
_CURVE = ["kind", "fork", "precision", "seed", "run", "space"]


def drift_curves(weights: pd.DataFrame, predictions: pd.DataFrame) -> pd.DataFrame:
    """Distance over training of the pairs that `KINDS` names, in weights and in predictions.

    Parameters
    ----------
    weights, predictions : tables of `weight_differences` and `prediction_differences`.

    Returns
    -------
    DataFrame : kind, fork (the step behind which the two runs differ), precision, seed, run, space ("weights": relative
        L2 distance of all weights pooled; "predictions": RMS difference over RMS of the reference), step, distance. A
        row per snapshot behind the fork at which the runs differ.
    """
    model = pd.concat([whole_model(weights, kind) for kind in KINDS])
    parts = [model.assign(space="weights", distance=model["relative_l2"])]
    parts.append(
        predictions[predictions["kind"].isin(KINDS)].assign(space="predictions", distance=lambda x: x["relative"])
    )
    rows = pd.concat(parts, ignore_index=True).astype({name: str for name in ("kind", "variant", "precision", "run")})
    rows["fork"] = rows["variant"].str.extract(r"from step (\d+)", expand=False).fillna("0").astype(int)
    rows = rows[(rows["step"] > rows["fork"]) & (rows["distance"] > 0)]
    return rows[[*_CURVE, "step", "distance"]].astype({"distance": float}).reset_index(drop=True)


def growth(curves: pd.DataFrame) -> pd.DataFrame:
    """Growth and saturation of each pair's distance.

    The level is the median distance over the last quarter of the snapshots. A distance is saturated from the first
    snapshot at which it is at least `SATURATED` of the level. The growth is that of the least-squares line through the
    logarithms of the distances before.

    Returns
    -------
    DataFrame : `drift_curves`' naming columns, factor (by which the distance is multiplied every 100 steps; NaN with
        fewer than two snapshots before saturation), points (snapshots that it is fitted to), saturated (step), level.
    """
    rows = []
    for keys, curve in curves.sort_values("step").groupby(_CURVE, sort=False):
        step, distance = curve["step"].to_numpy(), curve["distance"].to_numpy()
        level = np.median(distance[-max(1, len(distance) // 4) :])
        points = int(np.argmax(distance >= SATURATED * level))
        slope = np.polyfit(step[:points], np.log(distance[:points]), 1)[0] if points >= 2 else np.nan
        row = dict(zip(_CURVE, keys)) | {"factor": np.exp(100 * slope), "points": points}
        rows.append(row | {"saturated": int(step[points]), "level": level})
    return pd.DataFrame(rows)


def growth_intervals(growths: pd.DataFrame) -> pd.DataFrame:
    """Factor per 100 steps over the seeds: space, precision, kind, seeds, centre, low, high, saturated (median step).

    Of pairs that differ from the first step on. A seed's twins count as one, by their median.
    """
    rows = []
    started = growths[(growths["fork"] == 0) & growths["factor"].notna()]
    for keys, part in started.groupby(["space", "precision", "kind"]):
        seeds = part.groupby("seed")[["factor", "saturated"]].median()
        if len(seeds) >= 2:
            centre, low, high = log_ratio_interval(seeds["factor"])
            row = dict(zip(("space", "precision", "kind"), keys)) | {"seeds": len(seeds), "centre": centre}
            rows.append(row | {"low": low, "high": high, "saturated": seeds["saturated"].median()})
    return pd.DataFrame(rows)


def flash_beside_twins(curves: pd.DataFrame) -> pd.DataFrame:
    """Flash over its ulp twins, seed by seed: how fast the distance grows, and how large it is.

    Returns
    -------
    DataFrame : a row per (precision, space, what): seeds, centre, low, high, detectable. what is "growth" (ratio of the
        factors per 100 steps), "distance while growing" (geometric mean of the ratio over the snapshots at which
        neither is saturated) or "distance at the end" (the same over the last quarter of the training).
    """
    growths = growth(curves[curves["fork"] == 0])
    keys = ["precision", "space", "seed"]

    def side(frame: pd.DataFrame, kind: str, value: str, by: list[str]) -> pd.Series:
        return frame[frame["kind"] == kind].groupby(by)[value].median()

    factors = side(growths, FLASH, "factor", keys) / side(growths, TWIN, "factor", keys)
    parts = {"growth": factors}
    started = curves[curves["fork"] == 0]
    steps = [*keys, "step"]
    ratio = (side(started, FLASH, "distance", steps) / side(started, TWIN, "distance", steps)).rename("ratio")
    both = ratio.dropna().reset_index("step")
    for column, kind in (("flash", FLASH), ("twin", TWIN)):
        both = both.join(side(growths, kind, "saturated", keys).rename(column))
    growing = both["step"] < both[["flash", "twin"]].min(axis=1)
    both["ratio"] = np.log(both["ratio"])
    parts["distance while growing"] = np.exp(both[growing].groupby(keys)["ratio"].mean())
    parts["distance at the end"] = np.exp(both[both["step"] > 0.75 * both["step"].max()].groupby(keys)["ratio"].mean())
    rows = []
    for what, values in parts.items():
        for (precision, space), part in values.dropna().groupby(["precision", "space"]):
            if len(part) >= 2:
                centre, low, high = log_ratio_interval(part)
                row = {"precision": precision, "space": space, "what": what, "seeds": len(part)}
                rows.append(row | {"centre": centre, "low": low, "high": high, "detectable": detectable_ratio(part)})
    return pd.DataFrame(rows)
