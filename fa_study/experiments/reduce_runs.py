"""`python -m fa_study.experiments.reduce_runs [FOLDER]`: turn finished training runs into the tables of the weights.

The folder (default: runs) is searched for runs that differ in one thing. Weights stay where they are; the tables in
notebooks/data keep the distances, with the runs' own commits, threads and settings in the manifest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

from fa_study.experiments.weights import runs_in, weight_differences
from fa_study.tables import ROOT, commit, write_table


def loss_curves(folder: Path) -> pd.DataFrame:
    """The loss of every finished run in `folder`: run, attn, precision, seed, twin, step, loss."""
    frames = []
    for run, settings in runs_in(folder).items():
        frame = pd.read_csv(run / "metrics.csv")[["step", "loss"]]
        for place, (column, value) in enumerate(
            {
                "run": run.name,
                "attn": settings["attn"]["name"],
                "precision": settings["precision.name"],
                "seed": settings["seed"],
                "twin": settings["twin"],
            }.items()
        ):
            frame.insert(place, column, value)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def origins(folder: Path) -> dict[str, object]:
    """Where the runs of `folder` come from, for the manifest of a table."""
    runs = runs_in(folder)
    manifests = [json.loads((run / "manifest.json").read_text()) for run in runs]
    return {
        # Looked up once, since the first table that is written makes the checkout "dirty".
        "commit": commit(),
        "runs": [run.name for run in runs],
        "run_commits": sorted({manifest["commit"] for manifest in manifests}),
        "run_threads": sorted({manifest["threads"] for manifest in manifests}),
        "run_devices": sorted({manifest["device_name"] for manifest in manifests}),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fa_study.experiments.reduce_runs", description=__doc__.split(": ", 1)[1]
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=ROOT / "runs", help="run folders lie in it; default: runs"
    )
    folder = parser.parse_args(arguments).folder
    differences = weight_differences(folder)
    if differences.empty:
        parser.error(f"{folder} holds no two finished runs that differ in one thing; `make demo` makes four")
    facts = origins(folder)
    for name, frame in (("weights.parquet", differences), ("losses.parquet", loss_curves(folder))):
        path = write_table(frame, name, command="make study", **facts)
        print(f"{path.relative_to(ROOT)}: {len(frame)} rows from {len(facts['runs'])} runs")


if __name__ == "__main__":
    main()
