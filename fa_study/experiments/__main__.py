"""`python -m fa_study.experiments [NAME ...]`: make the stored tables again, all or those named.

An interrupted run goes on where it stopped. One thread, because bits depend on the number of threads.
"""

from __future__ import annotations

import argparse
import sys

import torch

from fa_study.experiments.attribution import ATTRIBUTION
from fa_study.experiments.blocks import BLOCKS
from fa_study.experiments.control import CONTROL
from fa_study.experiments.dose import DOSE_ERRORS
from fa_study.experiments.formats import FORMATS
from fa_study.experiments.fp8 import FP8
from fa_study.experiments.law import LAW
from fa_study.experiments.lengths import LENGTHS
from fa_study.experiments.published import PUBLISHED_TABLES
from fa_study.experiments.sweep import Sweep, forget_cells, run_sweep
from fa_study.experiments.ten_times import TEN_TIMES, TRAINED
from fa_study.tables import DATA, commit, read_manifest, write_table

# Table -> how it is made. A further table is a further line.
TABLES: dict[str, Sweep] = {
    "fig03_formats.parquet": FORMATS,
    "fig03_fp8.parquet": FP8,
    "fig05_lengths.parquet": LENGTHS,
    "fig06_blocks.parquet": BLOCKS,
    "ten_times.parquet": TEN_TIMES,
    "ten_times_trained.parquet": TRAINED,
    "control.parquet": CONTROL,
    "law.parquet": LAW,
    "attribution.parquet": ATTRIBUTION,
    "dose_errors.parquet": DOSE_ERRORS,
    **PUBLISHED_TABLES,
}


def expected_time(names: list[str]) -> str:
    """What the manifest remembers of how long the tables took, as a sentence."""
    manifest = read_manifest()
    known = {name: manifest[name]["seconds"] for name in names if "seconds" in manifest.get(name, {})}
    text = ", ".join(f"{name} {seconds / 60:.1f} min" for name, seconds in known.items())
    unknown = [name for name in names if name not in known]
    return (
        f"Expected on a machine like the manifest's, one thread: {sum(known.values()) / 60:.0f} min"
        + (f" ({text})" if text else "")
        + (f"; unknown: {', '.join(unknown)}" if unknown else "")
        + "."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fa_study.experiments", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)}; all if none is given")
    names = parser.parse_args(arguments).names or list(TABLES)
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        parser.error(f"unknown table {unknown[0]}: use {', '.join(TABLES)}")
    torch.set_num_threads(1)
    print(expected_time(names), flush=True)
    # Before the first table changes the checkout, which would make the second one's commit "dirty".
    source = commit()
    for name in names:
        sweep = TABLES[name]
        frame, seconds = run_sweep(name, sweep)
        command = f"python -m fa_study.experiments {name}"
        path = write_table(frame, name, command=command, seeds=sweep.seeds, seconds=round(seconds), commit=source)
        forget_cells(name)
        print(f"{path.relative_to(DATA.parents[1])}: {len(frame)} rows, {seconds:.0f} s of processor time", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
