"""Figures 7 and 8: distances between the weights of training runs that differ in one thing, snapshot by snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml
from scipy.stats import kendalltau

from fa_study.snapshots import snapshot_steps
from fa_study.trajectories import pair_distances

METRICS = ["max_difference", "wasserstein", "wasserstein_floor", "mean_difference", "relative_l2"]
# What the weights of a run depend on, as dotted names in its config.yaml, and the value that an absent one stands for.
SETTINGS = {
    "attn": None,
    "precision.name": None,
    "seed": None,
    "data_seed": 0,
    "twin": 0,
    "repeat": 0,
    "threads": 1,
    "batch_split": 1,
    "batch_size": None,
    "steps": None,
    "model": None,
    "data": None,
    "optimizer": None,
    "device": None,
}
# (setting, value of the first run, value of the second) -> what the comparison of two runs is called.
KINDS = {
    ("attn", "flash", "baseline"): "Flash against Baseline",
    ("precision.name", "bf16", "fp32"): "BF16 against FP32",
    ("precision.name", "fp16_emulated", "fp32"): "FP16 against FP32",
}
# Settings whose every change is a control of one kind.
CONTROLS = {
    "seed": "other initialisation",
    "data_seed": "other data order",
    "twin": "ulp twin",
    "repeat": "the same again",
    "threads": "other thread count",
    "batch_split": "batch in parts",
}


@dataclass(frozen=True)
class Pair:
    """Two run folders that differ in one thing: what it is, and the precision and seed of the run compared with."""

    kind: str
    run: Path
    reference: Path
    precision: str
    seed: int


def run_settings(run: Path) -> dict:
    """What a run's weights depend on: `SETTINGS` out of its config.yaml."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    settings = {}
    for name, default in SETTINGS.items():
        group, _, leaf = name.partition(".")
        settings[name] = config[group][leaf] if leaf else config.get(group, default)
    return settings


def runs_in(folder: Path) -> dict[Path, dict]:
    """{run folder: settings} of every finished run in `folder`, in order of name."""
    runs = {}
    for manifest in sorted(folder.glob("*/manifest.json")):
        if json.loads(manifest.read_text())["state"] == "finished":
            runs[manifest.parent] = run_settings(manifest.parent)
    return runs


def pairs_in(folder: Path) -> Iterator[Pair]:
    """Every two finished runs in `folder` that differ in one thing.

    A control is compared with the Baseline run from which it differs. Initialisations are compared one with the next,
    so that no run counts more than twice.
    """
    runs = runs_in(folder)
    for run, settings in runs.items():
        for reference, others in runs.items():
            kind = _kind(settings, others)
            if kind is not None:
                yield Pair(kind, run, reference, others["precision.name"], others["seed"])


def _kind(a: dict, b: dict) -> str | None:
    differing = [name for name in SETTINGS if a[name] != b[name]]
    if len(differing) != 1:
        return None
    (name,) = differing
    # What is compared with is a run without any control.
    if any(b[control] != SETTINGS[control] for control in CONTROLS if control != "seed"):
        return None
    if name == "attn":
        return KINDS.get((name, a[name]["name"], b[name]["name"]))
    if b["attn"]["name"] != "baseline":
        return None
    if name == "seed":
        return CONTROLS[name] if a[name] == b[name] + 1 else None
    return CONTROLS.get(name) or KINDS.get((name, a[name], b[name]))


def weight_trajectory(run_a: Path, run_b: Path) -> pd.DataFrame:
    """`weight_distances` at every step of which both runs hold a snapshot, with the column `step` in front."""
    steps = sorted(set(snapshot_steps(run_a)) & set(snapshot_steps(run_b)))
    if not steps:
        raise ValueError(f"{run_a} and {run_b} hold no snapshot of the same step")
    return pair_distances({step: ((run_a, step), (run_b, step)) for step in steps}, n_jobs=1)


def weight_differences(folder: Path) -> pd.DataFrame:
    """The distances between the weights of every pair of runs in `folder`.

    Returns
    -------
    DataFrame : a row per (kind, precision, seed, step, level, name, average), with `METRICS` as columns; empty if there
        is no pair. Rows of single tensors are kept only where the exact gradient is zero: these parameters are no part
        of a group or of the model.
    """
    frames = []
    for pair in pairs_in(folder):
        frame = weight_trajectory(pair.run, pair.reference)
        frame = frame[frame["level"].isin(["group", "model"]) | frame["zero_gradient"]]
        frame = frame[["step", "level", "name", "average", *METRICS]]
        for place, column in enumerate(("kind", "precision", "seed")):
            frame.insert(place, column, getattr(pair, column))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


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
    twins = whole_model(frame, "ulp twin", average).groupby(keys)[metric].median()
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
