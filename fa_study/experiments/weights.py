"""Figures 7 and 8: distances between the weights of training runs that differ in one thing, snapshot by snapshot."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path

import pandas as pd
from scipy.stats import kendalltau

from fa_study.distance import weight_distances
from fa_study.experiments.runs import Pair, pairs_in
from fa_study.snapshots import load_weights, snapshot_steps

METRICS = ["max_difference", "wasserstein", "wasserstein_floor", "mean_difference", "relative_l2"]
# Pairs of which every single tensor is kept.
TENSORS_OF = ("Flash against Baseline", "ulp twin")


def weight_trajectory(run_a: Path, run_b: Path) -> pd.DataFrame:
    """`weight_distances` at every step of which both runs hold a snapshot, with the column `step`.

    A run with itself is compared with its own step 0: the distance that training has travelled.
    """
    steps = sorted(set(snapshot_steps(run_a)) & set(snapshot_steps(run_b)))
    if not steps:
        raise ValueError(f"{run_a} and {run_b} hold no snapshot of the same step")
    frames = []
    for step in steps:
        # Read whole: these models are small, and each tensor is looked at several times.
        a, b = (dict(load_weights(run, at)) for run, at in ((run_a, step), (run_b, 0 if run_a == run_b else step)))
        frames.append(weight_distances(a, b, n_jobs=1).assign(step=step))
    return pd.concat(frames, ignore_index=True)


def weight_differences(folder: Path, known: Container[str] = ()) -> pd.DataFrame:
    """The distances between the weights of every pair of runs in `folder` whose name is not `known`.

    Returns
    -------
    DataFrame : a row per (run, kind, variant, precision, seed, step, level, name, average), with `METRICS` as columns;
        empty if there is no pair. Groups are pooled. Single tensors are kept of the kinds in `TENSORS_OF`, and of the
        others where the exact gradient is zero: these parameters are no part of a group or of the model.
    """
    return pair_table(folder, _kept_distances, known)


def pair_table(
    folder: Path, measure: Callable[[Pair], pd.DataFrame | None], known: Container[str] = ()
) -> pd.DataFrame:
    """What `measure` gives for each pair of runs in `folder`, with what names the pair in front; None: nothing."""
    frames = []
    for pair in pairs_in(folder):
        frame = None if pair.name in known else measure(pair)
        if frame is None:
            continue
        for place, column in enumerate(("name", "kind", "variant", "precision", "seed")):
            frame.insert(place, "run" if column == "name" else column, getattr(pair, column))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _kept_distances(pair: Pair) -> pd.DataFrame:
    frame = weight_trajectory(pair.run, pair.reference)
    tensors = frame["zero_gradient"] | ((frame["level"] == "tensor") & (pair.kind in TENSORS_OF))
    groups = (frame["level"] == "group") & (frame["average"] == "pooled")
    frame = frame[tensors | groups | (frame["level"] == "model")]
    return frame[["step", "level", "name", "average", "zero_gradient", *METRICS]]


def whole_model(frame: pd.DataFrame, kind: str, average: str = "pooled") -> pd.DataFrame:
    """The rows of one kind of comparison for the model as a whole."""
    return frame[(frame["kind"] == kind) & (frame["level"] == "model") & (frame["average"] == average)]


def ratio_to_twins(frame: pd.DataFrame, metric: str, average: str = "pooled") -> pd.DataFrame:
    """The distance between Flash and Baseline over that between Baseline and its ulp twins.

    A twin starts from weights that differ by about one unit in the last place and is otherwise the same run: it shows
    what training makes of any perturbation. A ratio of 1 means that Flash moves the weights no further than that.

    Returns
    -------
    DataFrame : precision, seed, step, ratio; of several twins of a seed the median counts. Only where both exist and
        the twins differ at all.
    """
    keys = ["precision", "seed", "step"]
    flash = whole_model(frame, "Flash against Baseline", average).set_index(keys)[metric]
    from_start = frame[frame["variant"] == ""]  # a twin that forks later has not differed for as long
    twins = whole_model(from_start, "ulp twin", average).groupby(keys)[metric].median()
    ratio = (flash / twins[twins > 0]).dropna()
    return ratio.rename("ratio").reset_index().query("step > 0").reset_index(drop=True)


def drift_trend(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Does the drift only grow? Per precision and seed, Kendall's rank correlation of step and distance.

    Returns
    -------
    DataFrame : precision, seed, tau (1: every later snapshot lies further away), p (that a series without a trend has
        a tau as large), falls (intervals in which the distance fell), increments (intervals in all), growth (last
        distance over the first that is not 0).
    """
    rows = []
    for (precision, seed), run in frame.sort_values("step").groupby(["precision", "seed"]):
        values = run.loc[run[metric] > 0, metric].to_numpy()
        if len(values) < 2:
            raise ValueError(f"{precision}, seed {seed}: a trend needs two snapshots that differ, got {len(values)}")
        increments = values[1:] - values[:-1]
        trend = kendalltau(range(len(values)), values, alternative="greater")
        rows.append(
            {
                "precision": precision,
                "seed": seed,
                "tau": trend.statistic,
                "p": trend.pvalue,
                "falls": int((increments < 0).sum()),
                "increments": len(increments),
                "growth": values[-1] / values[0],
            }
        )
    return pd.DataFrame(rows)
