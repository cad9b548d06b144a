"""Figure 7: distances between the weights of paired training runs, snapshot by snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import yaml
from scipy.stats import kendalltau

from fa_study.distance import weight_distances
from fa_study.snapshots import load_weights, snapshot_steps

METRICS = ["max_difference", "wasserstein", "mean_difference", "relative_l2"]


def run_settings(run: Path) -> dict:
    """The resolved configuration of a run folder (config.yaml), and the state it is in (manifest.json)."""
    state = json.loads((run / "manifest.json").read_text())["state"]
    return {"state": state, **yaml.safe_load((run / "config.yaml").read_text())}


def runs_in(folder: Path) -> dict[Path, dict]:
    """{run folder: settings} of every finished run in `folder`, in order of name."""
    manifests = sorted(folder.glob("*/manifest.json"))
    runs = {manifest.parent: run_settings(manifest.parent) for manifest in manifests}
    return {run: settings for run, settings in runs.items() if settings["state"] == "finished"}


def flash_pairs(folder: Path) -> Iterator[tuple[Path, Path, dict]]:
    """Every (Flash run, Baseline run, settings) in `folder` that differ in their attention alone."""
    runs = runs_in(folder)
    for flash, settings in runs.items():
        if settings["attn"]["name"] != "flash":
            continue
        for baseline, others in runs.items():
            if others == {**settings, "attn": others["attn"]} and others["attn"]["name"] == "baseline":
                yield flash, baseline, settings


def weight_trajectory(run_a: Path, run_b: Path) -> pd.DataFrame:
    """`weight_distances` at every step of which both runs hold a snapshot, with the column `step` in front."""
    steps = sorted(set(snapshot_steps(run_a)) & set(snapshot_steps(run_b)))
    if not steps:
        raise ValueError(f"{run_a} and {run_b} hold no snapshot of the same step")
    frames = []
    for step in steps:
        frame = weight_distances(load_weights(run_a, step), load_weights(run_b, step), n_jobs=1)
        frame.insert(0, "step", step)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def weight_differences(folder: Path) -> pd.DataFrame:
    """Figure 7's table: the distance between Flash-trained and Baseline-trained weights of every pair in `folder`.

    Returns
    -------
    DataFrame : a row per (precision, seed, step, level, name, average), the metrics of `METRICS` as columns; empty if
        there is no pair. Parameters whose exact gradient is zero are no part of a group or of the model.
    """
    frames = []
    for flash, baseline, settings in flash_pairs(folder):
        frame = weight_trajectory(flash, baseline)
        frame = frame[frame["level"].isin(["group", "model"]) | frame["zero_gradient"]]
        frame = frame[["step", "level", "name", "average", *METRICS]]
        frame.insert(0, "seed", settings["seed"])
        frame.insert(0, "precision", settings["precision"]["name"])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


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
