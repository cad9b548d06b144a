"""How fast training amplifies a difference between two runs, where it ends, and what of Flash's drift that explains.

A difference too small to matter grows from step to step until the two runs have nothing in common but what every run
has; from there on it depends less and less on how small it was.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fa_study.experiments.intervals import detectable_ratio, log_ratio_interval
from fa_study.experiments.weights import whole_model

FLASH, TWIN = "Flash against Baseline", "ulp twin"
KINDS = [FLASH, TWIN, "BF16 against FP32", "FP16 against FP32"]
RISEN = 1 / 3
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
    """Growth of each pair's distance, and when it has risen.

    The level is the median distance over the last quarter of the snapshots, whether or not it still grows. A distance
    has risen at the first snapshot at which it is at least `RISEN` of the level. The growth is that of the
    least-squares line through the logarithms of the distances before.

    Returns
    -------
    DataFrame : `drift_curves`' naming columns, factor (by which the distance is multiplied every 100 steps; NaN with
        fewer than two snapshots before it has risen), points (snapshots that it is fitted to), risen (step), level.
    """
    rows = []
    for keys, curve in curves.sort_values("step").groupby(_CURVE, sort=False):
        step, distance = curve["step"].to_numpy(), curve["distance"].to_numpy()
        level = np.median(distance[-max(1, len(distance) // 4) :])
        points = int(np.argmax(distance >= RISEN * level))
        slope = np.polyfit(step[:points], np.log(distance[:points]), 1)[0] if points >= 2 else np.nan
        row = dict(zip(_CURVE, keys)) | {"factor": np.exp(100 * slope), "points": points}
        rows.append(row | {"risen": int(step[points]), "level": level})
    return pd.DataFrame(rows)


def growth_intervals(growths: pd.DataFrame) -> pd.DataFrame:
    """Factor per 100 steps over the seeds: space, precision, kind, seeds, all_seeds, centre, low, high, risen.

    Of pairs that differ from the first step on. A seed's twins count as one, by their median. Seeds that rise too fast
    for two snapshots have no factor: all_seeds and risen (the median step) count them, the others do not.
    """
    rows = []
    for keys, part in growths[growths["fork"] == 0].groupby(["space", "precision", "kind"]):
        seeds = part.groupby("seed")[["factor", "risen"]].median()
        factors = seeds["factor"].dropna()
        if len(factors) >= 2:
            centre, low, high = log_ratio_interval(factors)
            row = dict(zip(("space", "precision", "kind"), keys)) | {"seeds": len(factors), "all_seeds": len(seeds)}
            rows.append(row | {"centre": centre, "low": low, "high": high, "risen": seeds["risen"].median()})
    return pd.DataFrame(rows)


def beside_twins(curves: pd.DataFrame, kind: str = FLASH) -> pd.DataFrame:
    """Flash, or another kind of pair, over the ulp twins of its precision, seed by seed: how fast it grows, how large.

    Returns
    -------
    DataFrame : a row per (precision, space, what): seeds, centre, low, high, detectable. what is "growth" (ratio of the
        factors per 100 steps), "distance while growing" (geometric mean of the ratio over the snapshots at which
        neither has risen) or "distance at the end" (the same over the last quarter of the training).
    """
    growths = growth(curves[curves["fork"] == 0])
    keys = ["precision", "space", "seed"]

    def side(frame: pd.DataFrame, of: str, value: str, by: list[str]) -> pd.Series:
        return frame[frame["kind"] == of].groupby(by)[value].median()

    factors = side(growths, kind, "factor", keys) / side(growths, TWIN, "factor", keys)
    parts = {"growth": factors}
    started = curves[curves["fork"] == 0]
    steps = [*keys, "step"]
    ratio = (side(started, kind, "distance", steps) / side(started, TWIN, "distance", steps)).rename("ratio")
    both = ratio.dropna().reset_index("step")
    for column, each in (("pair", kind), ("twin", TWIN)):
        both = both.join(side(growths, each, "risen", keys).rename(column))
    growing = both["step"] < both[["pair", "twin"]].min(axis=1)
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
