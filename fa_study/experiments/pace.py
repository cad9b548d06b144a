"""The runs of the study one by one: what they were, where they ran, and how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import yaml
from scipy.cluster.hierarchy import DisjointSet

from fa_study.experiments.predictions import run_columns
from fa_study.experiments.runs import runs_in


def run_records(folder: Path) -> pd.DataFrame:
    """A row per finished run: run, arm, precision, seed, ..., model, size, steps, batch_size, seconds_per_step, ...

    seconds_per_step is what the clock said, on a machine that did other things as well.
    """
    rows = []
    for run, settings in runs_in(folder).items():
        manifest = json.loads((run / "manifest.json").read_text())
        config = yaml.safe_load((run / "config.yaml").read_text())
        row = run_columns(run, settings) | {"model": config["model"]["name"], "size": config["model"]["size"]}
        row |= {key: config[key] for key in ("steps", "batch_size")}
        rows.append(row | {key: manifest.get(key) for key in ("seconds_per_step", "threads", "device_name", "commit")})
    return pd.DataFrame(rows)


def seconds_per_step(runs: pd.DataFrame) -> dict[tuple[str, str, str, str], float]:
    """{(arm, precision, model, size): median seconds of a step, per picture of its batch}."""
    pace = (runs["seconds_per_step"] / runs["batch_size"]).rename("pace")
    return pace.groupby([runs[key] for key in ("arm", "precision", "model", "size")]).median().to_dict()


def made_again(
    losses: pd.DataFrame, runs: pd.DataFrame, first_losses: pd.DataFrame, first: pd.DataFrame
) -> pd.DataFrame:
    """Do runs that were made again on another machine have the same losses, as FP32 numbers?

    Equal losses at every step of a long run mean equal bits all along: training amplifies any difference.

    Parameters
    ----------
    losses, runs : `predictions.loss_curves` and `run_records` of the runs made again.
    first_losses, first : the same of the runs that were made first.

    Returns
    -------
    DataFrame : run, precision, first_device, device, steps (at which both have a loss), equal (at how many of them the
        two are equal), until (the last step before the first difference; NaN if there is no step before).
    """
    if losses.empty or first_losses.empty:
        return pd.DataFrame()
    both = runs.merge(first[["run", "device_name"]].rename(columns={"device_name": "first_device"}), on="run")
    rows = []
    for run in both[both["device_name"] != both["first_device"]].itertuples():
        new, old = (
            table[table["run"] == run.run].set_index("step")["loss"].dropna().astype("float32")
            for table in (losses, first_losses)
        )
        new, old = new.align(old, join="inner")
        same = (new == old).sort_index()
        before = same.index[same.cummin()]
        rows.append(
            {
                "run": run.run,
                "precision": run.precision,
                "first_device": run.first_device,
                "device": run.device_name,
                "steps": len(same),
                "equal": int(same.sum()),
                "until": before.max() if len(before) else float("nan"),
            }
        )
    return pd.DataFrame(rows)


def mixed_processors(runs: pd.DataFrame, again: pd.DataFrame) -> list[str]:
    """The seeds whose runs come from processors that may compute other bits, a sentence for each.

    Runs of one seed are compared with each other, and training makes as much of another processor's last bit as of any
    perturbation that the study looks at.

    Parameters
    ----------
    runs : `run_records`.
    again : `made_again`; processors all of whose repeated runs had equal losses count as one.
    """
    alike = DisjointSet(runs["device_name"].unique())
    if not again.empty:
        equal = (again["equal"] == again["steps"]).groupby([again["first_device"], again["device"]]).all()
        for first, second in equal.index[equal]:
            alike.add(first), alike.add(second)
            alike.merge(first, second)
    sentences = []
    for seed, part in runs.groupby("seed"):
        counts = part.groupby(part["device_name"].map(alike.__getitem__))["device_name"].agg(["first", "size"])
        if len(counts) > 1:
            told = " and ".join(f"{row.size} on {row.first}" for row in counts.itertuples(index=False))
            sentences.append(f"of the runs of seed {seed}, {told}")
    return sentences
