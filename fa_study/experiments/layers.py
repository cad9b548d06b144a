"""Where in the network: Flash's deviation at each attention call beside the drift of each layer's weights.

A layer's name is its path in the denoiser, such as transformer_blocks.0.attn1: attn1 is self-attention, attn2
cross-attention to the caption.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from scipy import stats

from fa_study.experiments.amplification import FLASH, TWIN
from fa_study.experiments.intervals import log_ratio_interval

PARTS = {
    "self-attention": r"^denoiser\..*\.attn1\.",
    "cross-attention": r"^denoiser\..*\.attn2\.",
    "feed-forward": r"^denoiser\..*\.ff\.",
    "text encoder": r"^text_encoder\.",
}
OTHER = "other"
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
    DataFrame : a row per (precision, seed, step, layer): part; deviation, the RMS error of Flash against FP64 on the
        run's own inputs; baseline, that of Baseline on the same inputs; flash and twin, the geometric mean of the
        relative L2 distance over the layer's weight matrices.
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
    errors = errors.rename(columns={"flash": "deviation"})
    return moved.join(errors, how="inner").reset_index().rename_axis(columns=None)


def rank_correlations(layers: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation over the layers between deviation and drift, seed by seed.

    Returns
    -------
    DataFrame : a row per (precision, seed): flash (correlation of Flash's deviation with the drift that it causes) and
        twin (with the drift of the ulp twin, in which no attention differs), both averaged over the probed steps.
    """
    rows = []
    for (precision, seed, _), part in layers.groupby(_RUN):
        if len(part) >= 3:
            rho = {side: stats.spearmanr(part["deviation"], part[side]).statistic for side in ("flash", "twin")}
            rows.append({"precision": precision, "seed": seed, **rho})
    frame = pd.DataFrame(rows, columns=["precision", "seed", "flash", "twin"])
    return frame.groupby(["precision", "seed"], as_index=False).mean()


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


def mean_interval(values: pd.Series, confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): Student's t over the seeds, for numbers that are no ratios."""
    if len(values) < 2:
        raise ValueError(f"an interval takes two or more values, one per seed, got {list(values)}")
    half = stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stats.sem(values)
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


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
