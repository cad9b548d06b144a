"""`python -m fa_study.experiments.reduce_runs [FOLDER]`: turn finished training runs into the study's tables.

The folder (default: runs) is searched for runs that differ in one thing. Weights stay where they are; the tables keep
the distances, with the runs' own commits, threads and settings in the manifest. Rows about runs that are not in the
folder stay, so that a study may grow seed by seed and drop its weights on the way, and pairs that the tables hold are
not measured again; --replace starts over. A run that was made again replaces what the tables hold only if it tells
more, as a family of twins does that has grown, or with --again; whether its losses were the same is noted in
runs_again.csv. All runs of a seed have to come from one processor, or from several whose runs there had equal losses:
otherwise nothing is written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Iterable
from pathlib import Path

import pandas as pd

from fa_study.experiments.pace import made_again, mixed_processors, run_records
from fa_study.experiments.predictions import deviations, loss_curves, prediction_differences
from fa_study.experiments.runs import pairs_in
from fa_study.experiments.systematic import inner_products
from fa_study.experiments.weights import weight_differences
from fa_study.tables import DATA, ROOT, read_manifest, read_table, write_table

PAIRS: dict[str, Callable[[Path, Container[str]], pd.DataFrame]] = {
    "weights.parquet": weight_differences,
    "predictions.parquet": prediction_differences,
}
RUNS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "runs.csv": run_records,
    "losses.parquet": loss_curves,
    "deviations.parquet": deviations,
    "systematic.parquet": inner_products,
}
AGAIN = "runs_again.csv"


def origins(names: Iterable[str], records: pd.DataFrame) -> dict[str, list]:
    """Where the runs of these names come from, for a table in the manifest, as far as `run_records` tell."""
    own = records[records["run"].isin(set(names))]
    columns = {"run_commits": "commit", "run_threads": "threads", "run_devices": "device_name"}
    return {"runs": sorted(names), **{key: sorted(own[name].unique().tolist()) for key, name in columns.items()}}


def merged(new: pd.DataFrame, stored: pd.DataFrame, *, again: bool = False) -> pd.DataFrame:
    """`new` behind the stored rows about other runs; of two versions of a run the longer, or the stored one.

    A run of more steps is a version of the shorter one. again: of two that are equally long, the new one.
    """
    if new.empty or stored.empty:
        return stored if new.empty else new
    run, had = (table["run"].str.replace(r"-steps\d+", "", regex=True) for table in (new, stored))
    longer = run.map(_length(new, run)) > run.map(_length(stored, had)).fillna(0) - again
    return pd.concat([stored[~had.isin(run[longer])], new[longer]], ignore_index=True)


def _length(table: pd.DataFrame, run: pd.Series) -> pd.Series:
    """How much a table tells of each run: its steps where they stand in the row, else the number of rows."""
    return table["steps"].groupby(run).sum() if "steps" in table else run.value_counts()


def compact(frame: pd.DataFrame) -> pd.DataFrame:
    """The table in FP32: seven digits are more than any of these numbers has."""
    return frame.astype({column: "float32" for column in frame.select_dtypes("float64")})


def reduce_runs(
    folder: Path, tables: Path = DATA, *, replace: bool = False, again: bool = False, command: str = "make study"
) -> list[str]:
    """Write the tables of the runs in `folder`; returns a line about each.

    replace: forget stored rows about other runs. again: measure again, and replace, what the tables hold of these.

    Raises
    ------
    ValueError
        If no two finished runs in `folder` differ in one thing, or processors would be mixed (`mixed_processors`).
    """
    if not any(pairs_in(folder)):
        raise ValueError(f"{folder} holds no two finished runs that differ in one thing; `make demo` makes four")
    entries = {} if replace else read_manifest(tables)
    stored = {name: read_table(name, tables) if name in entries else pd.DataFrame() for name in (*PAIRS, *RUNS, AGAIN)}
    frames = {}
    for name, measure in PAIRS.items():
        known = () if again else set(stored[name].get("run", ()))
        frames[name] = merged(measure(folder, known), stored[name], again=again)
    new = {name: measure(folder) for name, measure in RUNS.items()}
    frames |= {name: merged(new[name], stored[name], again=again) for name in RUNS}
    repeated = made_again(*(held[name] for held in (new, stored) for name in ("losses.parquet", "runs.csv")))
    frames[AGAIN] = pd.concat([stored[AGAIN], repeated], ignore_index=True)
    if not frames[AGAIN].empty:
        frames[AGAIN] = frames[AGAIN].drop_duplicates(["run", "first_device", "device"])
    if mixed := mixed_processors(frames["runs.csv"], frames[AGAIN]):
        others = f"; likewise of {len(mixed) - 2} other seeds" if len(mixed) > 2 else ""
        raise ValueError(
            f"nothing written: {'; '.join(mixed[:2])}{others}, which have not shown equal losses, would be "
            "compared; make all runs of a seed on one processor (with --again they replace those that the tables hold)"
        )
    # The folder's own last, as pairs may refer to a shorter run whose place in the table a longer one has.
    records = pd.concat([frames["runs.csv"], new["runs.csv"]]).drop_duplicates("run")
    lines = []
    for name, frame in frames.items():
        if not frame.empty:
            names = {*new["runs.csv"]["run"], *entries.get(name, {}).get("runs", ())}
            facts = origins(names & set(records["run"]), records)  # without those whose place longer runs took
            write_table(
                compact(frame) if name.endswith(".parquet") else frame,
                name,
                command=command,
                folder=tables,
                **facts,
            )
            lines.append(f"{name}: {len(frame)} rows, from {len(facts['runs'])} runs")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fa_study.experiments.reduce_runs", description=__doc__.split(": ", 1)[1]
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=ROOT / "runs", help="run folders lie in it; default: runs"
    )
    parser.add_argument("--replace", action="store_true", help="forget stored rows about other runs")
    parser.add_argument(
        "--again", action="store_true", help="replace stored rows about these runs, if they tell as much"
    )
    options = parser.parse_args(arguments)
    try:
        print("\n".join(reduce_runs(options.folder, replace=options.replace, again=options.again)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
