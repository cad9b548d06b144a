"""Run every benchmark of this folder, one after the other, and store the table that the book's page on speed shows.

`python tests/benchmarks/run.py` runs all; names after it run only those: `python tests/benchmarks/run.py distance`.
"""

import importlib
import sys
from pathlib import Path

import pandas as pd
import torch
from harness import show

from fa_study.tables import write_table

FOLDER = Path(__file__).parent
AVAILABLE = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def main(names: list[str]) -> None:
    unknown = sorted(set(names) - set(AVAILABLE))
    if unknown:
        raise SystemExit(f"unknown benchmark {', '.join(unknown)}; there are: {', '.join(AVAILABLE)}")
    torch.set_num_threads(1)
    rows = []
    for name in names or AVAILABLE:
        measured = importlib.import_module(f"bench_{name}").measure()
        show(measured)
        rows += [{"topic": name, **row} for row in measured]
    if not names:
        write_table(pd.DataFrame(rows), "speed.csv", command="make bench")


if __name__ == "__main__":
    main(sys.argv[1:])
