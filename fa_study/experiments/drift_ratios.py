"""Figure 8's questions: drift beside the distance that training covers, and low precision beside Flash."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from fa_study.experiments.intervals import log_ratio_interval
from fa_study.experiments.runs import TRAVELLED
from fa_study.experiments.weights import ratio_to_twins, whole_model

PAPER_RATIO = (2.0, 5.0)  # low precision over Flash, as the paper has it
METRICS = ["wasserstein", "relative_l2", "max_difference", "mean_difference"]
PREDICTIONS = "prediction_rms"
LOW_PRECISION = ["FP16 against FP32", "BF16 against FP32"]
_PAIRED = ["precision", "seed", "step", "average", "metric"]


def long_form(table: pd.DataFrame, predictions: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of the whole model, one per metric: run, kind, variant, precision, seed, step, average, metric, value.

    Parameters
    ----------
    table, predictions : of `weight_differences` and `prediction_differences`. The RMS difference of the predictions
        stands under every average of the weights, none of which it depends on.
    """
    model = table[table["level"] == "model"]
    names = ["run", "kind", "variant", "precision", "seed", "step", "average"]
    kept = model[[*names, *(name for name in METRICS if name in model)]]
    if predictions is not None:
        averages = kept[["average"]].drop_duplicates()
        kept = kept.merge(
            predictions[[*names[:-1], "rms"]].rename(columns={"rms": PREDICTIONS}).merge(averages, how="cross"),
            on=names,
            how="outer",
        )
    kept = kept.astype({name: str for name in ("run", "kind", "variant", "precision", "average")})
    return kept.melt(names, var_name="metric").dropna(subset="value")


def per_seed(frame: pd.DataFrame, values: str | list[str], by: list[str]) -> pd.DataFrame:
    """The median of a seed's pairs, by `by` and seed: several twins of one seed count as one."""
    return frame.groupby([*by, "seed"], sort=True, observed=True)[values].median().reset_index()


def relative_drift(table: pd.DataFrame, predictions: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each pair's distance, the same over the distance that its reference has covered since step 0, and minus step 0.

    The subtraction is the naive way of taking the offset from the curve of two initialisations. It is invalid: for
    independent parts, distances add in squares if they are L2 and by no rule at all if they are W1.

    Returns
    -------
    DataFrame : `long_form` with raw, relative and minus_start in place of value.
    """
    long = long_form(table, predictions)
    travelled = long[long["kind"] == TRAVELLED].set_index(_PAIRED)["value"].rename("travelled")
    rows = long[long["kind"] != TRAVELLED].join(travelled, on=_PAIRED)
    first = rows[rows["step"] == 0]
    keys = ["run", "kind", "variant", "precision", "seed", "average", "metric"]
    rows = rows.join(first.set_index(keys)["value"].rename("start"), on=keys)
    rows["relative"] = rows["value"] / rows["travelled"].where(rows["travelled"] > 0)
    rows["minus_start"] = rows["value"] - rows["start"]
    return rows.rename(columns={"value": "raw"}).drop(columns=["travelled", "start"])


def low_precision_ratios(table: pd.DataFrame, predictions: pd.DataFrame | None = None) -> pd.DataFrame:
    """Distance that low precision makes over that which Flash makes, by metric and average, with its interval.

    Both against the same Baseline run of a seed where Flash is compared in FP32, and of that seed in BF16 otherwise.

    Returns
    -------
    DataFrame : low (the kind of low precision), precision (in which Flash is compared with Baseline), metric, average,
        step, seeds, centre, low_end, high_end (`log_ratio_interval`); combinations with fewer than two seeds are left
        out.
    """
    long = long_form(table, predictions)
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


def slope_differences(table: pd.DataFrame, metrics: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """Growth of Flash's distance per 1,000 steps, minus that of two initialisations, with Welch's t-interval.

    One slope per pair of runs, by least squares over the steps. Of the initialisations only every second pair counts,
    so that no run is in two of them.

    Returns
    -------
    DataFrame : metric, precision, flash and other (mean slopes), difference, low, high, flash_pairs, other_pairs; in
        units of the weights per 1,000 steps. Precisions with fewer than two pairs of either are left out.
    """
    rows = []
    flash, other = (whole_model(table, kind) for kind in ("Flash against Baseline", "other initialisation"))
    other = other[other["seed"] % 2 == 0]
    for metric in metrics:
        for precision in sorted(set(flash["precision"]) & set(other["precision"])):
            slopes = [
                part[part["precision"] == precision]
                .groupby("seed")[["step", metric]]
                .apply(lambda run, metric=metric: 1000 * np.polyfit(run["step"], run[metric], 1)[0])
                for part in (flash, other)
            ]
            if min(map(len, slopes)) < 2:
                continue
            interval = stats.ttest_ind(*slopes, equal_var=False).confidence_interval(confidence)
            means = [each.mean() for each in slopes]
            row = {"metric": metric, "precision": precision, "flash": means[0], "other": means[1]}
            row |= {"difference": means[0] - means[1], "low": interval.low, "high": interval.high}
            rows.append(row | {"flash_pairs": len(slopes[0]), "other_pairs": len(slopes[1])})
    names = ["metric", "precision", "flash", "other", "difference", "low", "high", "flash_pairs", "other_pairs"]
    return pd.DataFrame(rows, columns=names)


def scatter_ratios(table: pd.DataFrame, metric: str, confidence: float = 0.95) -> pd.DataFrame:
    """How much more FP16's distance varies from seed to seed than Flash's, at the last step.

    The ratio of the standard deviations of the logarithms over the seeds that both have, with the interval of the
    F distribution.

    Returns
    -------
    DataFrame : precision (in which Flash is compared with Baseline), seeds, ratio, low, high.
    """
    rows = []
    low, flash = (whole_model(table, kind) for kind in ("FP16 against FP32", "Flash against Baseline"))
    for precision, part in flash.groupby("precision"):
        both = part.merge(low, on=["seed", "step"], suffixes=("_flash", "_low"))
        both = both[both["step"] == both["step"].max()]
        if len(both) < 3:
            continue
        spreads = [np.log(both[f"{metric}_{name}"]).std() for name in ("low", "flash")]
        edge = stats.f.ppf((1 + confidence) / 2, len(both) - 1, len(both) - 1) ** 0.5
        ratio = spreads[0] / spreads[1]
        rows.append((precision, len(both), ratio, ratio / edge, ratio * edge))
    return pd.DataFrame(rows, columns=["precision", "seeds", "ratio", "low", "high"])


def at_the_end(table: pd.DataFrame, predictions: pd.DataFrame) -> pd.DataFrame:
    """Every kind of pair at the last step beside the ulp twins, and what the Wasserstein distance keeps of it.

    Returns
    -------
    DataFrame : pair, precision, seeds, and medians over the seeds: weights (relative L2 distance), predictions (RMS
        difference over RMS), over twins (weights, over the twins of the same seed and precision; NaN without any),
        W1 / mean |d| and W1 / floor (`weight_distances`).
    """
    names = ["kind", "precision"]
    model = table[(table["level"] == "model") & (table["average"] == "pooled") & ~table["kind"].eq(TRAVELLED)]
    model = model.merge(predictions[["run", "step", "relative"]], on=["run", "step"], how="left")
    uniform = model["variant"].eq("uniform bf16") & model["precision"].eq("bf16")
    model = model[(model["step"] == model["step"].max()) & (model["variant"].eq("") | uniform)]
    model = model.assign(
        kept=model["wasserstein"] / model["mean_difference"], floors=model["wasserstein"] / model["wasserstein_floor"]
    ).astype({name: str for name in names})
    seeds = per_seed(model, ["relative_l2", "relative", "kept", "floors"], names)
    twins = seeds[seeds["kind"] == "ulp twin"].set_index(["precision", "seed"])["relative_l2"].rename("twin")
    seeds = seeds.join(twins, on=["precision", "seed"]).assign(over=lambda x: x["relative_l2"] / x["twin"])
    columns = {"relative_l2": "weights", "relative": "predictions", "over": "over twins"}
    columns |= {"kept": "W1 / mean |d|", "floors": "W1 / floor"}
    grouped = seeds.groupby(names)
    rows = grouped[list(columns)].median().assign(seeds=grouped["seed"].nunique()).reset_index()
    rows["precision"] = rows["precision"].str.removesuffix("_emulated").str.upper()
    rows = rows.sort_values("relative_l2").rename(columns={"kind": "pair", **columns})
    return rows[["pair", "precision", "seeds", *columns.values()]].reset_index(drop=True)
