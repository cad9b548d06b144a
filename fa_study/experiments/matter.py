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
from scipy import stats

from fa_study.experiments.amplification import FLASH, TWIN
from fa_study.experiments.intervals import detectable_ratio, log_ratio_interval
from fa_study.experiments.pace import run_records
from fa_study.experiments.predictions import run_columns
from fa_study.experiments.reduce_runs import compact, merged, origins
from fa_study.experiments.runs import PLAIN, Pair, plain, runs_in
from fa_study.experiments.weights import pair_table
from fa_study.tables import DATA, read_manifest, read_table, write_table

OTHER = "other initialisation"
LAST = 5
BARRIER = 0.02
# Losses within this share of each other count as equal: less than two initialisations differ by. Our choice, made after
# the runs had been seen.
MARGIN = 0.05
# The first seed of the sweep `fresh`, which was trained to check what the seeds before had shown.
FRESH = 8
SAMPLED_SEEDS = (0, 1)
RUN = ["arm", "precision", "seed", "twin"]
# What is compared -> (arm, twin, precision) of the one run and of the other, for each precision that both have.
PAIRS = {FLASH: (("flash", 0), ("baseline", 0)), TWIN: (("baseline", 1), ("baseline", 0))}
_LOW = {"BF16 against FP32": "bf16", "FP16 against FP32": "fp16_emulated"}
_RATIO = ["kind", "precision", "seeds", "centre", "low", "high", "detectable", "spread", "t", "wilcoxon"]


def plain_losses(losses: pd.DataFrame) -> pd.DataFrame:
    """The held-out losses of the plain runs and their twins.

    Later forks and other controls are left out, and of runs that differ in their number of steps alone all but the
    longest.

    Parameters
    ----------
    losses : table of `predictions.loss_curves`.
    """
    wanted = PLAIN | {"twin_step": 0}
    wanted.pop("twin")
    rows = losses[losses["held_out_loss"].notna() & (losses[list(wanted)] == pd.Series(wanted)).all(axis=1)]
    end = rows.groupby("run", observed=True)["step"].transform("max")
    rows = rows[end == end.groupby([rows[key] for key in RUN]).transform("max")]
    return rows.astype({"arm": str, "precision": str}).sort_values("step")


def last_losses(losses: pd.DataFrame, last: int = LAST, average: str = "mean") -> pd.Series:
    """Mean (or median) held-out loss of each run over its last snapshots.

    Parameters
    ----------
    losses : table of `predictions.loss_curves`.
    last : number of snapshots; single ones scatter with what the last few batches were.

    Returns
    -------
    Series : by (arm, precision, seed, twin), of `plain_losses`.
    """
    final = plain_losses(losses).groupby([*RUN, "run"], observed=True).tail(last)
    return final.astype({"held_out_loss": float}).groupby(RUN)["held_out_loss"].agg(average)


def one_arm(values: pd.Series, arm: str, twin: int, precision: str) -> pd.Series:
    """Of values by (arm, precision, seed, twin) those of one arm, by seed."""
    places = values.index.to_frame()
    wanted = places["arm"].eq(arm) & places["twin"].eq(twin) & places["precision"].eq(precision)
    return values[wanted].droplevel(["arm", "precision", "twin"])


def loss_ratios(losses: pd.DataFrame, average: str = "mean") -> pd.DataFrame:
    """Ratio of the held-out losses of two runs, paired by seed, for Flash, a twin, low precision and another seed.

    Returns
    -------
    DataFrame : a row per (kind, precision): seeds, centre, low, high, detectable (`log_ratio_interval`,
        `detectable_ratio`), spread (standard deviation of the logarithms over the seeds), t and wilcoxon (two-sided p
        of both tests of the logarithms). Two initialisations have no order, so that "other initialisation" has a
        spread alone: sqrt(2) times the standard deviation of the logarithm of Baseline's loss.
    """
    final = last_losses(losses, average=average)
    found: dict[tuple[str, str], pd.Series] = {}
    rows = []
    for precision in sorted(set(final.index.get_level_values("precision"))):
        for kind, (ours, theirs) in PAIRS.items():
            found[kind, precision] = one_arm(final, *ours, precision) / one_arm(final, *theirs, precision)
        baseline = one_arm(final, "baseline", 0, precision)
        if len(baseline) >= 2:
            spread = np.sqrt(2) * np.log(baseline).std()
            rows.append({"kind": OTHER, "precision": precision, "seeds": len(baseline), "spread": spread})
    for kind, low in _LOW.items():
        found[kind, "fp32"] = one_arm(final, "baseline", 0, low) / one_arm(final, "baseline", 0, "fp32")
    for (kind, precision), ratios in found.items():
        ratios = ratios.dropna()
        if len(ratios) >= 2:
            logs = np.log(ratios)
            centre, low, high = log_ratio_interval(ratios)
            row = {"kind": kind, "precision": precision, "seeds": len(ratios), "centre": centre, "low": low}
            row |= {"high": high, "detectable": detectable_ratio(ratios), "spread": logs.std()}
            row["t"] = stats.ttest_1samp(logs, 0).pvalue if logs.std() else float((logs == 0).all())
            row["wilcoxon"] = stats.wilcoxon(logs).pvalue if logs.any() else 1.0
            rows.append(row)
    return pd.DataFrame(rows, columns=_RATIO)


def flash_losses(losses: pd.DataFrame) -> pd.DataFrame:
    """What the losses of Flash and Baseline say: equal, different or undecided, by precision, seeds and statistic.

    A finding is "equal" if the whole interval lies within `MARGIN` of 1, else "differs" if it leaves 1 out, else
    "undecided".

    Returns
    -------
    DataFrame : `loss_ratios` of Flash by which ("fresh": seeds from `FRESH` on; "first": those before; "all"; without
        fresh seeds only "all") and average ("mean" or "median" of the last snapshots), with finding and primary: True
        for the mean over the fresh seeds, or over all where none are fresh.

    Raises
    ------
    ValueError : no precision has Flash and Baseline runs of two seeds.
    """
    parts = {"fresh": losses[losses["seed"] >= FRESH], "first": losses[losses["seed"] < FRESH], "all": losses}
    tables = [
        loss_ratios(part, average).assign(which=which, average=average).query("kind == @FLASH")
        for average in ("mean", "median")
        for which, part in parts.items()
    ]
    tables = [table for table in tables if len(table)]
    if not tables:
        raise ValueError("an interval of the loss takes plain Flash and Baseline runs of two or more seeds, got fewer")
    table = pd.concat(tables, ignore_index=True)
    renewed = table["precision"].isin(table.loc[table["which"] == "fresh", "precision"])
    equal = (table["low"] >= 1 / (1 + MARGIN)) & (table["high"] <= 1 + MARGIN)
    differs = (table["low"] > 1) | (table["high"] < 1)
    table["finding"] = np.select([equal, differs], ["equal", "differs"], "undecided")
    table["primary"] = table["average"].eq("mean") & table["which"].eq(np.where(renewed, "fresh", "all"))
    return table[renewed | (table["which"] == "all")].reset_index(drop=True)


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
    return pd.DataFrame(rows, columns=["kind", "precision", "seed", "barrier", "alpha", "dip", "connected"])


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
        wanted = (about["arm"], about["twin"]) in {side for pair in PAIRS.values() for side in pair}
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
    entries, told, here = read_manifest(tables), [], run_records(folder)
    records = pd.concat([read_table("runs.csv", tables), here]) if "runs.csv" in entries else here
    for name, measure in (("lines.parquet", lines), ("samples.parquet", sample_strips)):
        stored = read_table(name, tables) if name in entries else pd.DataFrame()
        frame = merged(measure(folder), stored)
        if not frame.empty:
            command = "python -m fa_study.experiments.matter runs/study"
            facts = origins({*here["run"], *entries.get(name, {}).get("runs", ())}, records.drop_duplicates("run"))
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
