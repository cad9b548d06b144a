"""`python -m fa_study.experiments.matter FOLDER`: the lines and samples of a folder of runs, as tables.

Does the drift matter? A user of the model sees three things: the loss on held-out pictures, the samples, and whether
two runs came to the same valley (the loss along the straight line between their weights, `train/line.py`). Rows about
runs that are not in the folder stay.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Container
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from fa_study.experiments.amplification import FLASH, TWIN
from fa_study.experiments.intervals import detectable_ratio, log_ratio_interval
from fa_study.experiments.predictions import run_columns
from fa_study.experiments.reduce_runs import compact, joined, merged, origins
from fa_study.experiments.runs import PLAIN, Pair, plain, runs_in
from fa_study.experiments.weights import pair_table
from fa_study.tables import DATA, read_manifest, read_table, write_table

OTHER = "other initialisation"
LAST = 5
BARRIER = 0.02
SAMPLED_SEEDS = (0, 1)
# What is compared -> (arm, twin, precision) of the one run and of the other, for each precision that both have.
_PAIRS = {FLASH: (("flash", 0), ("baseline", 0)), TWIN: (("baseline", 1), ("baseline", 0))}
_LOW = {"BF16 against FP32": "bf16", "FP16 against FP32": "fp16_emulated"}


def last_losses(losses: pd.DataFrame, last: int = LAST, average: str = "mean") -> pd.Series:
    """Mean (or median) held-out loss of each run over its last snapshots.

    Parameters
    ----------
    losses : table of `predictions.loss_curves`.
    last : number of snapshots; single ones scatter with what the last few batches were.

    Returns
    -------
    Series : by (arm, precision, seed, twin). Later forks and other controls are left out, and of runs that differ in
        their number of steps alone all but the longest.
    """
    keys = ["arm", "precision", "seed", "twin"]
    wanted = PLAIN | {"twin_step": 0}
    wanted.pop("twin")
    rows = losses[losses["held_out_loss"].notna() & (losses[list(wanted)] == pd.Series(wanted)).all(axis=1)]
    end = rows.groupby("run", observed=True)["step"].transform("max")
    rows = rows[end == end.groupby([rows[key] for key in keys]).transform("max")]
    final = rows.sort_values("step").groupby([*keys, "run"]).tail(last)
    return final.astype({"arm": str, "precision": str}).groupby(keys)["held_out_loss"].agg(average)


def loss_ratios(losses: pd.DataFrame, average: str = "mean") -> pd.DataFrame:
    """Ratio of the held-out losses of two runs, paired by seed, for Flash, a twin, low precision and another seed.

    Returns
    -------
    DataFrame : a row per (kind, precision): seeds, centre, low, high, detectable (`log_ratio_interval`,
        `detectable_ratio`), spread (standard deviation of the logarithms over the seeds). For "other initialisation"
        the pairs are seed s + 1 over seed s, so that its spread is that of two runs that share nothing but the data.
    """
    final = last_losses(losses, average=average)
    found: dict[tuple[str, str], pd.Series] = {}

    def arm(name: str, twin: int, precision: str) -> pd.Series:
        chosen = final[(final.index.get_level_values("arm") == name) & (final.index.get_level_values("twin") == twin)]
        return chosen[chosen.index.get_level_values("precision") == precision].droplevel(["arm", "precision", "twin"])

    for precision in sorted(set(final.index.get_level_values("precision"))):
        for kind, (ours, theirs) in _PAIRS.items():
            found[kind, precision] = arm(*ours, precision) / arm(*theirs, precision)
        baseline = arm("baseline", 0, precision)
        found[OTHER, precision] = baseline.rename(lambda seed: seed - 1) / baseline
    for kind, low in _LOW.items():
        found[kind, "fp32"] = arm("baseline", 0, low) / arm("baseline", 0, "fp32")
    rows = []
    for (kind, precision), ratios in found.items():
        ratios = ratios.dropna()
        if len(ratios) >= 2:
            centre, low, high = log_ratio_interval(ratios)
            row = {"kind": kind, "precision": precision, "seeds": len(ratios), "centre": centre, "low": low}
            row |= {"high": high, "detectable": detectable_ratio(ratios), "spread": np.log(ratios).std()}
            rows.append(row)
    return pd.DataFrame(rows)


def lines(folder: Path, known: Container[str] = ()) -> pd.DataFrame:
    """The losses that `train/line.py` has written into folder/lines, of the pairs whose name is not `known`.

    Returns
    -------
    DataFrame : a row per (run, kind, variant, precision, seed, alpha, batch): loss at (1 - alpha) run +
        alpha reference.
    """

    def read(pair: Pair) -> pd.DataFrame | None:
        path = folder / "lines" / f"{pair.name}.csv"
        return pd.read_csv(path) if path.exists() else None

    return pair_table(folder, read, known)


def barriers(table: pd.DataFrame) -> pd.DataFrame:
    """How far the loss rises on the line between two runs.

    The loss, averaged over the batches, over the straight line between its two ends, minus 1. The question is that of
    arXiv 1912.05671; that a rise below `BARRIER` counts as none is our choice.

    Returns
    -------
    DataFrame : a row per (kind, precision, seed): barrier (the largest rise, at least 0: the ends have none), alpha
        (where), dip (the smallest), connected.
    """
    rows = []
    for keys, part in table.groupby(["kind", "precision", "seed"], observed=True):
        mean = part.groupby("alpha")["loss"].mean()
        straight = np.interp(mean.index, [mean.index[0], mean.index[-1]], mean.iloc[[0, -1]])
        rise = mean / straight - 1
        row = dict(zip(("kind", "precision", "seed"), keys)) | {"barrier": max(0.0, rise.max()), "alpha": rise.idxmax()}
        rows.append(row | {"dip": rise.min(), "connected": rise.max() < BARRIER})
    return pd.DataFrame(rows)


def sample_strips(folder: Path) -> pd.DataFrame:
    """The samples of the plain Baseline and Flash runs and of the first twin, of the seeds in `SAMPLED_SEEDS`.

    Where a precision has but one of them, there is nothing to compare.

    Returns
    -------
    DataFrame : a row per run: run, arm, precision, seed, data_seed, twin, twin_step, png (bytes, a pixel per pixel).
    """
    rows = []
    for run, settings in runs_in(folder).items():
        about = run_columns(run, settings)
        wanted = (about["arm"], about["twin"]) in {side for pair in _PAIRS.values() for side in pair}
        wanted &= plain(settings | {"twin": 0}) and not about["twin_step"] and about["seed"] in SAMPLED_SEEDS
        if wanted and (run / "samples.png").exists():
            small = io.BytesIO()
            with Image.open(run / "samples.png") as picture:  # each pixel is drawn as 2 x 2
                picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.NEAREST).save(
                    small, "png", optimize=True
                )
            rows.append(about | {"png": small.getvalue()})
    frame = pd.DataFrame(rows)
    return frame[frame.groupby(["precision", "seed"])["run"].transform("size") > 1] if rows else frame


def reduce_matter(folder: Path, tables: Path = DATA) -> list[str]:
    """Write lines.parquet and samples.parquet from the runs in `folder`; returns a line about each."""
    entries, told = read_manifest(tables), []
    for name, measure in (("lines.parquet", lines), ("samples.parquet", sample_strips)):
        stored = read_table(name, tables) if name in entries else pd.DataFrame()
        frame = merged(measure(folder), stored)
        if not frame.empty:
            command = "python -m fa_study.experiments.matter runs/study"
            facts = joined(origins(folder), entries.get(name, {}))
            write_table(compact(frame), name, command=command, folder=tables, **facts)
            told.append(f"{name}: {len(frame)} rows")
    return told


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fa_study.experiments.matter", description=__doc__.split(": ", 1)[1]
    )
    parser.add_argument("folder", type=Path, help="run folders lie in it, and lines/ from train/line.py")
    folder = parser.parse_args(arguments).folder
    if not runs_in(folder):
        parser.error(f"{folder} holds no finished run; give a folder that train/study.py has filled")
    print("\n".join(reduce_matter(folder)))


if __name__ == "__main__":
    main()
