"""Figure 8's questions: drift beside the distance that training covers, and low precision beside Flash."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.intervals import log_ratio_interval
from fa_study.experiments.runs import TRAVELLED
from fa_study.experiments.weights import ratio_to_twins

PAPER_RATIO = (2.0, 5.0)  # low precision over Flash, as the paper has it
METRICS = ["wasserstein", "relative_l2", "max_difference", "mean_difference"]
LOW_PRECISION = ["FP16 against FP32", "BF16 against FP32"]
_PAIRED = ["precision", "seed", "step", "average", "metric"]


def long_form(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the whole model, one per metric: kind, variant, precision, seed, step, average, metric, value."""
    model = table[table["level"] == "model"]
    names = ["kind", "variant", "precision", "seed", "step", "average"]
    kept = model[[*names, *(name for name in METRICS if name in model)]].astype(
        {name: str for name in ("kind", "variant", "precision", "average")}
    )
    return kept.melt(names, var_name="metric")


def relative_drift(table: pd.DataFrame) -> pd.DataFrame:
    """Each pair's distance, the same over the distance that its reference has covered since step 0, and minus step 0.

    The subtraction is the naive way of taking the offset from the curve of two initialisations. It is invalid: for
    independent parts, distances add in squares if they are L2 and by no rule at all if they are W1.

    Returns
    -------
    DataFrame : `long_form` with raw, relative and minus_start in place of value.
    """
    long = long_form(table)
    travelled = long[long["kind"] == TRAVELLED].set_index(_PAIRED)["value"].rename("travelled")
    rows = long[long["kind"] != TRAVELLED].join(travelled, on=_PAIRED)
    first = rows[rows["step"] == 0]
    keys = ["kind", "variant", "precision", "seed", "average", "metric"]
    rows = rows.join(first.set_index(keys)["value"].rename("start"), on=keys)
    rows["relative"] = rows["value"] / rows["travelled"].where(rows["travelled"] > 0)
    rows["minus_start"] = rows["value"] - rows["start"]
    return rows.rename(columns={"value": "raw"}).drop(columns=["travelled", "start"])


def low_precision_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Distance that low precision makes over that which Flash makes, by metric and average, with its interval.

    Both against the same Baseline run of a seed where Flash is compared in FP32, and of that seed in BF16 otherwise.

    Returns
    -------
    DataFrame : low (the kind of low precision), precision (in which Flash is compared with Baseline), metric, average,
        step, seeds, centre, low_end, high_end (`log_ratio_interval`); combinations with fewer than two seeds are left
        out.
    """
    long = long_form(table)
    flash = long[long["kind"] == "Flash against Baseline"]
    rows = []
    for kind in LOW_PRECISION:
        low = long[long["kind"] == kind].set_index(["seed", "step", "average", "metric"])["value"].rename("low")
        both = flash.join(low, on=["seed", "step", "average", "metric"], how="inner")
        both = both[(both["value"] > 0) & (both["low"] > 0)]
        for keys, part in both.groupby(["precision", "metric", "average", "step"]):
            if len(part) >= 2:
                centre, low_end, high_end = log_ratio_interval(part["low"] / part["value"])
                row = {"low": kind, **dict(zip(("precision", "metric", "average", "step"), keys)), "seeds": len(part)}
                rows.append(row | {"centre": centre, "low_end": low_end, "high_end": high_end})
    names = ["low", "precision", "metric", "average", "step", "seeds", "centre", "low_end", "high_end"]
    return pd.DataFrame(rows, columns=names)


def twin_intervals(table: pd.DataFrame, metric: str = "relative_l2", average: str = "pooled") -> pd.DataFrame:
    """Flash's distance over its twins', geometric mean and interval over seeds: precision, step, seeds, centre, ..."""
    rows = []
    for (precision, step), part in ratio_to_twins(table, metric, average).groupby(["precision", "step"]):
        if len(part) >= 2:
            centre, low_end, high_end = log_ratio_interval(part["ratio"])
            row = {"precision": precision, "step": step, "seeds": len(part)}
            rows.append(row | {"centre": centre, "low_end": low_end, "high_end": high_end})
    return pd.DataFrame(rows)
