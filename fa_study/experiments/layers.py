"""Where in the network: Flash's deviation at each attention call beside the drift of each layer's weights.

A layer's name is its path in the denoiser, such as transformer_blocks.0.attn1: attn1 is self-attention, attn2
cross-attention to the caption.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats

from fa_study.experiments.amplification import FLASH, TWIN
from fa_study.experiments.intervals import log_ratio_interval, mean_interval
from fa_study.experiments.runs import TRAVELLED

PARTS = {
    "self-attention": r"^denoiser\..*\.attn1\.",
    "cross-attention": r"^denoiser\..*\.attn2\.",
    "feed-forward": r"^denoiser\..*\.ff\.",
    "text encoder": r"^text_encoder\.",
}
OTHER = "other"
# Column of `attention_layers` -> what it measures.
YARDSTICKS = {
    "deviation": "largest |Flash - Baseline|",
    "flash_error": "RMS error of Flash against FP64",
    "baseline_error": "RMS error of Baseline against FP64",
}
_LAYER = r"^denoiser\.(.*\.attn[12])\."
_RUN = ["precision", "seed", "step"]


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to: a key of `PARTS`, or "other"."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), OTHER)


def tensor_drift(weights: pd.DataFrame) -> pd.DataFrame:
    """Relative L2 distance of every tensor, of Flash and of the ulp twin from their Baseline run.

    Parameters
    ----------
    weights : table of `weight_differences`; twins that fork later are left out, of several the median counts.

    Returns
    -------
    DataFrame : precision, seed, step, name, zero_gradient, part, layer ("" outside the denoiser's attention), flash,
        twin; steps behind the first at which both have moved.
    """
    kept = (weights["level"] == "tensor") & weights["kind"].isin([FLASH, TWIN]) & (weights["variant"] == "")
    rows = weights[kept].astype({name: str for name in ("kind", "precision", "name")})
    keys = [*_RUN, "name", "zero_gradient"]
    wide = rows.pivot_table("relative_l2", keys, "kind", aggfunc="median").reindex(columns=[FLASH, TWIN]).dropna()
    wide = wide[(wide > 0).all(axis=1)].rename(columns={FLASH: "flash", TWIN: "twin"}).reset_index()
    wide["part"] = wide["name"].map(part_of)
    wide["layer"] = wide["name"].str.extract(_LAYER, expand=False).fillna("")
    return wide.rename_axis(columns=None)


def attention_layers(drift: pd.DataFrame, deviations: pd.DataFrame) -> pd.DataFrame:
    """Each attention layer's deviation beside the drift of its weights.

    Parameters
    ----------
    drift : `tensor_drift`.
    deviations : table of `predictions.deviations`; that of the Flash runs without a nudge is taken.

    Returns
    -------
    DataFrame : a row per (precision, seed, step, layer): part; deviation, the largest |Flash - Baseline| of the
        layer's output on the run's own inputs; flash_error and baseline_error, the RMS error of either against FP64 on
        the same inputs; keys, exp(entropy) of the probabilities, the number of keys that a query averages over; flash
        and twin, the geometric mean of the relative L2 distance over the layer's weight matrices.
    """
    matrices = drift[(drift["layer"] != "") & drift["name"].str.endswith(".weight")]
    moved = np.exp(
        matrices.assign(flash=np.log(matrices["flash"]), twin=np.log(matrices["twin"]))
        .groupby([*_RUN, "layer", "part"])[["flash", "twin"]]
        .mean()
    ).reset_index("part")
    probe = deviations[(deviations["arm"] == "flash") & (deviations["twin"] == 0)]
    probe = probe.astype({name: str for name in ("precision", "layer", "probed")})
    errors = probe.pivot_table("rms", [*_RUN, "layer"], "probed")[["flash", "baseline"]]
    shared = probe.groupby([*_RUN, "layer"]).agg(
        deviation=("max_flash_baseline", "first"), entropy=("entropy", "first")
    )
    shared = shared.join(errors.add_suffix("_error"))
    shared["keys"] = np.exp(shared.pop("entropy"))
    return moved.join(shared, how="inner").reset_index().rename_axis(columns=None)


def smallest_p(layers: int) -> float:
    """The two-sided p of a perfect rank correlation over so many layers: 2 / layers!, as two orders are perfect."""
    return min(1.0, 2 / math.factorial(layers))


def rank_correlations(layers: pd.DataFrame, yardstick: str = "deviation") -> pd.DataFrame:
    """Spearman's rank correlation over the layers between deviation and drift, seed by seed; ties share a rank.

    Parameters
    ----------
    layers : `attention_layers`. yardstick : the column that drift is held against, one of `YARDSTICKS`.

    Returns
    -------
    DataFrame : a row per (precision, seed): flash (correlation with the drift that Flash causes) and twin (with the
        drift of the ulp twin, in which no attention differs), both averaged over the probed steps; probes, their
        number. A probe that finds the same value in every layer has no correlation and does not count.
    """
    if yardstick not in YARDSTICKS:
        raise ValueError(f"yardstick is one of {', '.join(YARDSTICKS)}, got {yardstick!r}")
    rows = []
    for (precision, seed, _), part in layers.groupby(_RUN):
        if len(part) >= 3 and part[[yardstick, "flash", "twin"]].nunique().min() > 1:
            rho = {side: stats.spearmanr(part[yardstick], part[side]).statistic for side in ("flash", "twin")}
            rows.append({"precision": precision, "seed": seed, **rho})
    frame = pd.DataFrame(rows, columns=["precision", "seed", "flash", "twin"])
    by = frame.groupby(["precision", "seed"])
    return by.agg(flash=("flash", "mean"), twin=("twin", "mean"), probes=("flash", "size")).reset_index()


def yardstick_correlations(layers: pd.DataFrame) -> pd.DataFrame:
    """`rank_correlations` of every yardstick over the seeds.

    Returns
    -------
    DataFrame : precision, yardstick (a key of `YARDSTICKS`), seeds, probes (in all seeds), flash, low, high (mean over
        the seeds and its 95 % interval, within -1 and 1), twin, more_low, more_high (interval of flash - twin).
    """
    rows = []
    for yardstick in YARDSTICKS:
        for precision, rho in rank_correlations(layers, yardstick).groupby("precision"):
            if len(rho) >= 2:
                mean, low, high = mean_interval(rho["flash"])
                _, more_low, more_high = mean_interval(rho["flash"] - rho["twin"])
                row = {"precision": precision, "yardstick": yardstick, "seeds": len(rho), "probes": rho["probes"].sum()}
                row |= {"flash": mean, "low": max(-1.0, low), "high": min(1.0, high), "twin": rho["twin"].mean()}
                rows.append(row | {"more_low": more_low, "more_high": more_high})
    return pd.DataFrame(rows)


def drift_correlations(drift: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation over all tensors between Flash's and the twin's drift at the last step, by seed.

    Returns
    -------
    DataFrame : precision, seed, rho, tensors. Parameters without a gradient are left out.
    """
    last = drift[(drift["step"] == drift["step"].max()) & ~drift["zero_gradient"]]
    rows = [
        {"precision": p, "seed": s, "rho": stats.spearmanr(x["flash"], x["twin"]).statistic, "tensors": len(x)}
        for (p, s), x in last.groupby(["precision", "seed"])
    ]
    return pd.DataFrame(rows)


def self_over_cross(layers: pd.DataFrame) -> pd.DataFrame:
    """Self- over cross-attention: geometric means over layers and probed steps of a seed, with an interval over seeds.

    Returns
    -------
    DataFrame : precision, what ("deviation", "flash" or "twin": drift of that pair), seeds, centre, low, high.
    """
    rows = []
    names = ["deviation", "flash", "twin"]
    logs = layers.assign(**{name: np.log(layers[name]) for name in names})
    means = logs.groupby(["precision", "seed", "part"])[names].mean().unstack("part")
    for precision, part in means.groupby("precision"):
        for what in names:
            ratios = np.exp(part[what]["self-attention"] - part[what]["cross-attention"])
            if len(ratios) >= 2:
                centre, low, high = log_ratio_interval(ratios)
                row = {"precision": precision, "what": what, "seeds": len(ratios)}
                rows.append(row | {"centre": centre, "low": low, "high": high})
    return pd.DataFrame(rows)


def drift_by_part(drift: pd.DataFrame) -> pd.DataFrame:
    """Drift of the parts of the model at the last step.

    Returns
    -------
    DataFrame : a row per (precision, part): tensors, flash and twin (median over tensors and seeds of the relative L2
        distance), seeds, centre, low, high (Flash over twin, geometric mean over the tensors of a seed, with its
        interval over seeds). Key biases, whose exact gradient is zero, are a part of their own.
    """
    last = drift[drift["step"] == drift["step"].max()]
    last = last.assign(part=last["part"].where(~last["zero_gradient"], "key biases"))
    rows = []
    for (precision, part), group in last.groupby(["precision", "part"]):
        ratios = np.exp(np.log(group["flash"] / group["twin"]).groupby(group["seed"]).mean())
        if len(ratios) >= 2:
            centre, low, high = log_ratio_interval(ratios)
            row = {"precision": precision, "part": part, "tensors": group["name"].nunique()}
            row |= {"flash": group["flash"].median(), "twin": group["twin"].median(), "seeds": len(ratios)}
            rows.append(row | {"centre": centre, "low": low, "high": high})
    return pd.DataFrame(rows)


def key_bias_moves(weights: pd.DataFrame) -> pd.DataFrame:
    """How far the parameters whose exact gradient is zero are from their own start at the last step.

    Parameters
    ----------
    weights : table of `weight_differences`.

    Returns
    -------
    DataFrame : a row per (precision, model, name), the model being "denoiser" or "text encoder": step, moved (mean
        |change|) and relative (||change|| / ||value at the last step||), both the median over the seeds.
    """
    rows = weights[(weights["kind"] == TRAVELLED) & (weights["level"] == "tensor") & weights["zero_gradient"]]
    rows = rows[rows["step"] == rows["step"].max()].astype({name: str for name in ("precision", "name")})
    rows = rows.assign(model=rows["name"].str.split(".").str[0].str.replace("_", " "))
    by = rows.groupby(["precision", "model", "name", "step"])
    return by.agg(moved=("mean_difference", "median"), relative=("relative_l2", "median")).reset_index()


def decayed(optimizer: Mapping[str, float], steps: int) -> float:
    """What weight decay alone does to a weight without a gradient: |change| / |value after the last step|.

    AdamW multiplies a weight by 1 - lr_t weight_decay in step t; lr_t grows from 0 to lr in the first `warmup` steps.

    Parameters
    ----------
    optimizer : lr, warmup and weight_decay, as in conf/config.yaml.
    """
    rates = optimizer["lr"] * np.minimum(1, np.arange(1, steps + 1) / max(1, optimizer["warmup"]))
    return float(1 / np.prod(1 - rates * optimizer["weight_decay"]) - 1)
