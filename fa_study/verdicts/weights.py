"""The verdicts on the paper's claims about Figures 7 and 8: what happens to the weights."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.drift_ratios import (
    PAPER_RATIO,
    PREDICTIONS,
    low_precision_ratios,
    scatter_ratios,
    slope_differences,
)
from fa_study.experiments.weights import drift_trend
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Holds, Verdict

_METRICS = {"max_difference": "Max Difference", "wasserstein": "Wasserstein distance", "relative_l2": "relative L2"}


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
    steady = (trends.groupby(["precision", "seed"])["falls"].sum() == 0).sum()
    counts = trends.groupby("metric")[["falls", "increments"]].sum()
    pairs = model.groupby(["precision", "seed"]).ngroups
    only_grows = grows.all() and not trends["falls"].any()
    holds: Holds = "holds" if only_grows else "holds only where" if grows.any() else "does not hold"
    failing = trends[~grows].groupby("precision")["seed"].nunique()
    exceptions = ", ".join(f"{count} in {precision.upper()}" for precision, count in failing.items())
    text = (
        f"In {pairs} pairs of runs the weights drift apart with a rising trend"
        + (f", but for {exceptions} the trend is not established at {level:g}" if exceptions else "")
        + f"; without ever falling in {steady} of {pairs}: from one snapshot to the next "
        + " and ".join(f"{_METRICS[name]} fell in {row.falls} of {row.increments}" for name, row in counts.iterrows())
        + " intervals."
    )
    return Verdict("C7", holds, text)


def initialisation_verdict(table: pd.DataFrame) -> Verdict:
    """C8: is the drift between Flash and Baseline no faster than that between two random initialisations?

    It is no faster in a metric and precision if the 95 % interval of the difference of the mean growths per step lies
    below 0, and faster if it lies above.
    """
    slopes = slope_differences(table, tuple(_METRICS))
    words = [
        f"{_METRICS[row.metric]} in {row.precision.upper()} {row.flash:.2g} beside {row.other:.2g} (difference "
        f"{row.low:.2g} to {row.high:.2g})"
        for row in slopes.itertuples()
    ]
    below, above = int((slopes["high"] <= 0).sum()), int((slopes["low"] > 0).sum())
    pairs = "; ".join(
        f"{precision.upper()}: {row.flash_pairs} pairs of Flash and Baseline, {row.other_pairs} of initialisations"
        for precision, row in slopes.drop_duplicates("precision").set_index("precision").iterrows()
    )
    text = (
        f"In {len(slopes)} combinations of metric and precision, the distance of Flash from Baseline grows more slowly "
        f"than that of two initialisations in {below}, faster in {above}; {len(slopes) - below - above} are "
        f"open. Growth per 1,000 steps: {'; '.join(words)}. {pairs}, no run of which is in two."
    )
    return Verdict("C8", answer(below, below + above) if below + above else "undecided", text)


def low_precision_verdict(table: pd.DataFrame, predictions: pd.DataFrame | None = None) -> Verdict:
    """C9: does Flash move the weights 1/2 to 1/5 as far as low precision does, and FP16 more variably?

    Asked at every snapshot, in every metric of all weights pooled and of the predictions, for FP16 and BF16 against
    FP32, and with Flash and Baseline compared in either precision. It is so where the interval over seeds lies between
    2 and 5, and not where it lies outside.

    Parameters
    ----------
    table, predictions : of `weight_differences` and `prediction_differences`.
    """
    ratios = low_precision_ratios(table, predictions)
    ratios = ratios[ratios["average"] == "pooled"]
    low, high = PAPER_RATIO
    centred = int(ratios["centre"].between(low, high).sum())
    inside = int(((ratios["low_end"] >= low) & (ratios["high_end"] <= high)).sum())
    outside = int(((ratios["high_end"] < low) | (ratios["low_end"] > high)).sum())
    last = ratios[ratios["step"] == ratios["step"].max()]
    words = [
        f"{row.low}, Flash in {row.precision.upper()}: {row.centre:.2f} ({row.low_end:.2f} to {row.high_end:.2f}, "
        f"{row.seeds} seeds)"
        for row in last[last["metric"] == "relative_l2"].itertuples()
    ]
    spans = last.groupby("metric")["centre"].agg(["min", "max"])
    others = ", ".join(
        f"{spans.loc[metric, 'min']:.2f} to {spans.loc[metric, 'max']:.2f} {name}"
        for metric, name in (("wasserstein", "in Wasserstein distance"), (PREDICTIONS, "in the predictions"))
        if metric in spans.index
    )
    scatter = "; ".join(
        f"{row.ratio:.1f} times that of Flash in {row.precision.upper()} ({row.low:.1f} to {row.high:.1f})"
        for row in scatter_ratios(table, "relative_l2").itertuples()
    )
    text = (
        f"The distance that low precision makes, over that which Flash makes, lies between {low:g} and {high:g} in "
        f"{centred} of {len(ratios)} combinations of metric, precision and step, with its whole interval in {inside}, "
        f"with none of it in {outside} (counts, no test: neighbouring steps are alike). At step "
        f"{last['step'].max()}, in relative L2, {'; '.join(words)}; {others}."
        + (f" The scatter of FP16's distance over the seeds is {scatter}." if scatter else "")
    )
    return Verdict("C9", answer(inside, inside + outside) if inside + outside else "undecided", text)
