"""The verdicts on Figures 7 and 8: what happens to the weights."""

from __future__ import annotations

import numpy as np
import pandas as pd

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
    pairs = whole_model(table, "other initialisation").groupby("precision")["seed"].nunique().max()
    text = (
        "Growth per step of the distance of Flash from Baseline, over that of two initialisations: "
        f"{', '.join(words)}. "
        f"A preliminary answer, from {table['seed'].nunique()} seeds and {pairs} pair of initialisations per precision."
    )
    return Verdict("C8", answer(part, whole), text)


def low_precision_verdict(table: pd.DataFrame) -> Verdict:
    """C9: does Flash move the weights 1/2 to 1/5 as far as low precision does?

    Asked at every snapshot, in every metric, with Flash and Baseline compared in either precision. Low precision is
    BF16 against FP32, where the paper has FP16.
    """
    low_precision = whole_model(table, "BF16 against FP32").set_index(["seed", "step"])
    part, whole, words = 0, 0, {}
    for precision, flash in whole_model(table, "Flash against Baseline").groupby("precision"):
        flash = flash.set_index(["seed", "step"])
        for metric in _METRICS:
            ratio = (low_precision[metric] / flash.loc[flash[metric] > 0, metric]).dropna().groupby("step").median()
            part, whole = part + int(ratio.between(2, 5).sum()), whole + len(ratio)
            if metric == "relative_l2":
                words[precision] = f"{ratio.iloc[0]:.3g} at step {ratio.index[0]} to {ratio.iloc[-1]:.3g} at the last"
    text = (
        "The distance that BF16 makes, over that which Flash makes, lies between 2 and 5 in "
        f"{part} of {whole} combinations of metric, precision and step. In relative L2 it goes from "
        + "; ".join(f"{text} with Flash in {precision.upper()}" for precision, text in words.items())
        + f". A preliminary answer, from {table['seed'].nunique()} seeds, with BF16 in place of the paper's FP16."
    )
    return Verdict("C9", answer(part, whole), text)


def amplification_verdict(table: pd.DataFrame) -> Verdict:
    """Is the drift between Flash and Baseline no more than training makes of a unit in the last place?

    It is no more at a snapshot of a pair of runs if its relative L2 distance is at most 1.25 times the ulp twin's.
    """
    ratios = ratio_to_twins(table, "relative_l2")
    last = ratios[ratios["step"] == ratios["step"].max()]
    words = []
    for precision, part in ratios.groupby("precision"):
        end, top = last[last["precision"] == precision]["ratio"], part.loc[part["ratio"].idxmax()]
        words.append(
            f"{end.min():.2f} to {end.max():.2f} at the last step in {precision.upper()} ({len(end)} pairs), and at "
            f"most {top['ratio']:.2f} on the way (step {top['step']})"
        )
    text = (
        "Relative L2 distance of Flash from Baseline over that of a run nudged by one unit in the last place: "
        + "; ".join(words)
        + ". Each seed has few twins, so that single ratios scatter."
    )
    return Verdict("'the drift is amplification'", answer(int((ratios["ratio"] <= 1.25).sum()), len(ratios)), text)
