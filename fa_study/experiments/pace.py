"""The runs of the study one by one: what they were, where they ran, and how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import yaml

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
