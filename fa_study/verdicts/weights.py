"""The verdicts on Figures 7 and 8: what happens to the weights."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fa_study.experiments.drift_ratios import PAPER_RATIO, low_precision_ratios, twin_intervals
from fa_study.experiments.intervals import detectable_ratio
from fa_study.experiments.weights import drift_trend, ratio_to_twins, whole_model
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Holds, Verdict

_METRICS = {"max_difference": "Max Difference", "wasserstein": "Wasserstein distance", "relative_l2": "relative L2"}
_KEYS = ["precision", "seed"]


def drift_verdict(model: pd.DataFrame, *, level: float = 0.01) -> Verdict:
    """C7: does the distance between Flash-trained and Baseline-trained weights only grow with training?

    It counts as growing in a pair of runs if Kendall's rank correlation with the step is positive at `level`, in Max
    Difference and in Wasserstein distance. The claim holds if that is so in every pair and no distance ever falls. The
    snapshots of a run are not independent, so `level` is a threshold and no probability of error.

    Parameters
    ----------
    model : rows of Figure 7's table for one average over the whole model.
    """
    trends = pd.concat(drift_trend(model, name).assign(metric=name) for name in ("max_difference", "wasserstein"))
    grows = trends["p"] < level
    counts = trends.groupby("metric")[["falls", "increments"]].sum()
    pairs = model.groupby(["precision", "seed"]).ngroups
    only_grows = grows.all() and not trends["falls"].any()
    holds: Holds = "holds" if only_grows else "holds only where" if grows.any() else "does not hold"
    failing = trends[~grows].groupby("precision")["seed"].nunique()
    exceptions = ", ".join(f"{count} in {precision.upper()}" for precision, count in failing.items())
    text = (
        f"In {pairs} pairs of runs the weights drift apart with a rising trend"
        + (f", but for {exceptions} the trend is not established at {level:g}" if exceptions else "")
        + "; from one snapshot to the next "
        + " and ".join(f"{_METRICS[name]} fell in {row.falls} of {row.increments}" for name, row in counts.iterrows())
        + " intervals."
    )
    return Verdict("C7", holds, text)


def drift_rates(frame: pd.DataFrame, metric: str) -> pd.Series:
    """Growth of a distance per 1,000 steps, by least squares over the steps, for each (precision, seed)."""
    return frame.groupby(_KEYS)[["step", metric]].apply(lambda run: 1000 * np.polyfit(run["step"], run[metric], 1)[0])


def initialisation_verdict(table: pd.DataFrame) -> Verdict:
    """C8: is the drift between Flash and Baseline no faster than that between two random initialisations?

    It is no faster in a pair of runs if its distance grows by less per step than the median over the pairs of
    initialisations of the same precision.
    """
    part, whole, words = 0, 0, []
    for metric, name in _METRICS.items():
        flash = drift_rates(whole_model(table, "Flash against Baseline"), metric)
        other = drift_rates(whole_model(table, "other initialisation"), metric).groupby("precision").median()
        yardstick = flash.index.get_level_values("precision").map(other)
        slower, ratios = flash <= yardstick, flash / yardstick
        part, whole = part + int(slower.sum()), whole + len(slower)
        words.append(
            f"{name} {ratios.min():.2g} to {ratios.max():.2g} times (no faster in {slower.sum()} of {len(slower)})"
        )
    counts = [
        whole_model(table, kind).groupby("precision")["seed"].nunique()
        for kind in ("Flash against Baseline", "other initialisation")
    ]
    pairs = "; ".join(
        f"{p.upper()}: {count} pairs of Flash and Baseline, {counts[1].get(p, 0)} of initialisations"
        for p, count in counts[0].items()
    )
    text = (
        "Growth per step of the distance of Flash from Baseline, over that of two initialisations: "
        f"{', '.join(words)}. {pairs}."
    )
    return Verdict("C8", answer(part, whole), text)


def low_precision_verdict(table: pd.DataFrame) -> Verdict:
    """C9: does Flash move the weights 1/2 to 1/5 as far as low precision does?

    Asked at every snapshot, in every metric of all weights pooled, for FP16 and BF16 against FP32, and with Flash and
    Baseline compared in either precision. It is so where the geometric mean over seeds lies between 2 and 5.
    """
    ratios = low_precision_ratios(table)
    ratios = ratios[ratios["average"] == "pooled"]
    part, whole = int(ratios["centre"].between(*PAPER_RATIO).sum()), len(ratios)
    words = []
    for (low, precision), rows in ratios[ratios["metric"] == "relative_l2"].groupby(["low", "precision"], sort=False):
        first, last = rows.loc[rows["step"].idxmin()], rows.loc[rows["step"].idxmax()]
        begin = f"{float(format(first['centre'], '.3g')):,g}"  # three digits, without an exponent
        words.append(
            f"{low}, Flash in {precision.upper()}: {begin} at step {first['step']}, {last['centre']:.2f} "
            f"({last['low_end']:.2f} to {last['high_end']:.2f}, {last['seeds']} seeds) at step {last['step']}"
        )
    text = (
        "The distance that low precision makes, over that which Flash makes, lies between 2 and 5 in "
        f"{part} of {whole} combinations of metric, precision and step. In relative L2: {'; '.join(words)}."
    )
    return Verdict("C9", answer(part, whole), text)


def amplification_verdict(table: pd.DataFrame) -> Verdict:
    """Is the drift between Flash and Baseline no more than training makes of a unit in the last place?

    It is no more at a snapshot if the 95 % interval over seeds of the ratio of relative L2 distances (Flash over ulp
    twin) reaches down to 1.
    """
    intervals = twin_intervals(table)
    words = []
    for precision, rows in intervals.groupby("precision"):
        last, top = rows.loc[rows["step"].idxmax()], rows.loc[rows["centre"].idxmax()]
        ratios = ratio_to_twins(table, "relative_l2").query("precision == @precision and step == @last.step")["ratio"]
        words.append(
            f"in {precision.upper()} {last['centre']:.2f} ({last['low_end']:.2f} to {last['high_end']:.2f}, "
            f"{last['seeds']} seeds) at step {last['step']}, where a true ratio of {detectable_ratio(ratios):.2f} "
            f"would have been seen in 4 cases of 5, and at most {top['centre']:.2f} on the way (step {top['step']})"
        )
    text = (
        "Relative L2 distance of Flash from Baseline over that of a run nudged by one unit in the last place: "
        + "; ".join(words)
        + "."
    )
    return Verdict("'the drift is amplification'", answer(int((intervals["low_end"] <= 1).sum()), len(intervals)), text)


def uniform_in_training(table: pd.DataFrame) -> str:
    """How far attention with every intermediate in BF16 moves the weights, beside the ulp twins of the same seeds.

    Each seed at the last step that both have; "" if the table holds no such run with its twins.
    """
    tiled, twins = (
        whole_model(table, kind).astype({"variant": str}) for kind in ("tiled against Baseline", "ulp twin")
    )
    tiled = tiled[tiled["variant"].eq("uniform bf16") & tiled["precision"].eq("bf16")]
    twins = twins[twins["variant"].eq("") & twins["precision"].eq("bf16")]
    seeds = []
    for seed, rows in tiled[tiled["step"].isin(twins["step"])].groupby("seed"):
        last = rows.loc[rows["step"].idxmax()]
        floor = twins[twins["seed"].eq(seed) & twins["step"].eq(last["step"])]["relative_l2"]
        if len(floor):
            inside = "within" if floor.min() <= last["relative_l2"] <= floor.max() else "beside"
            span = f"{floor.min():.1%} to {floor.max():.1%} of its {len(floor)} ulp twins"
            seeds.append(
                f"those of seed {seed} {last['relative_l2']:.1%} at step {last['step']}, {inside} the "
                + (span if len(floor) > 1 else f"{floor.min():.1%} of its ulp twin")
            )
    if not seeds:
        return ""
    return (
        "With every intermediate of attention in BF16, as in the paper's re-implementation, weights move away from "
        f"Baseline's: {'; '.join(seeds)}."
    )


def systematic_verdict(effects: pd.DataFrame, *, level: float = 0.01) -> Verdict:
    """Does Flash move weights or predictions to somewhere of its own?

    It does so at a snapshot if the permutation test among the twins of one initialisation has p below `level`.

    Parameters
    ----------
    effects : `fa_study.experiments.systematic.systematic_effect`; families with too few twins for `level` are left out.

    Raises
    ------
    ValueError : no family has enough twins.
    """
    smallest = 2.0 ** (1 - effects["twins"])
    effects = effects[smallest < level]
    if effects.empty:
        raise ValueError(f"{smallest.min():.2g} is the smallest p that so few twins can give; use 8 or more per arm")
    words = []
    for (precision, space), rows in effects.groupby(["precision", "space"], observed=True):
        last, found = rows.loc[rows["step"].idxmax()], rows[rows["p"] < level]
        words.append(
            f"{space} in {precision.upper()} at {len(found)} of {len(rows)} snapshots"
            + (f", the last one at step {found['step'].max()}" if len(found) else "")
            + f" (at step {last['step']} {last['share']:.1%} of the squared distance, p = {last['p']:.2g}; "
            f"{last['detectable']:.1%} would have had p = 0.05)"
        )
    text = (
        f"Among {effects['twins'].max()} Flash and as many Baseline twins of one initialisation, what the Flash twins "
        f"have in common is found at p < {level:g} in {'; '.join(words)}."
    )
    return Verdict("'Flash has an effect of its own'", answer(int((effects["p"] < level).sum()), len(effects)), text)
