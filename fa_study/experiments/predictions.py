"""What training runs compute: losses, predictions on a fixed held-out batch, and deviations inside the model.

Weights can differ where functions do not (a permutation of the units, say); these tables compare functions.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file

from fa_study.experiments.runs import CONTROLS, TRAVELLED, Pair, arm, runs_in
from fa_study.experiments.weights import pair_table

RUN_COLUMNS = ("run", "arm", "precision", *CONTROLS, "twin_step")


def prediction(run: Path, step: int) -> torch.Tensor | None:
    """The predicted noise on the held-out batch, in float64, or None if the run kept none at this step."""
    path = run / "predictions" / f"step-{step:06d}.safetensors"
    return load_file(path)["predicted"].double() if path.exists() else None


def prediction_steps(run: Path) -> list[int]:
    """The steps at which a run kept its predictions."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (run / "predictions").glob("step-*.safetensors"))


def prediction_differences(folder: Path, known: Container[str] = ()) -> pd.DataFrame:
    """How far the predictions of every pair of runs are apart whose name is not `known`.

    Returns
    -------
    DataFrame : a row per (run, kind, variant, precision, seed, step): rms, the root of the mean squared difference, in
        units of the noise's standard deviation; relative, rms over the root mean square of the reference's prediction.
    """
    return pair_table(folder, _pair_predictions, known)


def _pair_predictions(pair: Pair) -> pd.DataFrame | None:
    rows = []
    for step in sorted(set(prediction_steps(pair.run)) & set(prediction_steps(pair.reference))):
        ours, theirs = prediction(pair.run, step), prediction(pair.reference, 0 if pair.kind == TRAVELLED else step)
        rms = float((ours - theirs).square().mean().sqrt())
        rows.append({"step": step, "rms": rms, "relative": rms / float(theirs.square().mean().sqrt())})
    return pd.DataFrame(rows) if rows else None


def run_columns(run: Path, settings: dict) -> dict[str, object]:
    """What names a single run in a table: `RUN_COLUMNS`."""
    own = (run.name, arm(settings), settings["precision.name"])
    return dict(zip(RUN_COLUMNS, (*own, *(settings[name] for name in RUN_COLUMNS[len(own) :]))))


def loss_curves(folder: Path) -> pd.DataFrame:
    """The losses of every finished run in `folder`.

    Returns
    -------
    DataFrame : a row per (run, step): loss, of the training batch (NaN where metrics.csv has no row for the step);
        held_out_loss, of the fixed held-out batch (NaN between snapshots).
    """
    frames = []
    for run, settings in runs_in(folder).items():
        lines = json.loads((run / "manifest.json").read_text())["snapshots"]
        held_out = pd.DataFrame([{"step": line["step"], "held_out_loss": line.get("held_out_loss")} for line in lines])
        frame = pd.read_csv(run / "metrics.csv")[["step", "loss"]].merge(held_out, on="step", how="outer")
        frames.append(frame.astype({"held_out_loss": float}).assign(**run_columns(run, settings)))
    return _named(frames)


def deviations(folder: Path) -> pd.DataFrame:
    """The deviation probe of every finished run that has one: error of Baseline and Flash inside the model.

    Returns
    -------
    DataFrame : a row per (run, step, layer, probed), with the probe's columns (`train.probes.attention_deviation`);
        probed is the attention whose error against FP64 is measured, on the run's own inputs.
    """
    frames = [
        pd.read_csv(run / "deviation.csv").rename(columns={"arm": "probed"}).assign(**run_columns(run, settings))
        for run, settings in runs_in(folder).items()
        if (run / "deviation.csv").exists()
    ]
    return _named(frames)


def _named(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """The frames one below the other, with the columns that name a run in front."""
    if not frames:
        return pd.DataFrame()
    whole = pd.concat(frames, ignore_index=True)
    return whole[[*RUN_COLUMNS, *(column for column in whole if column not in RUN_COLUMNS)]]
