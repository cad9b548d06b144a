"""A stored table as a list of cells that are measured one by one, so that an interrupted computation goes on."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from fa_study.tables import DATA, ROOT

Cell = dict[str, str | int]


@dataclass(frozen=True)
class Sweep:
    """How a table is made.

    Parameters
    ----------
    measure : called with a cell's entries as keywords; gives the cell's rows.
    cells : the settings; their entries become the first columns of the table.
    seeds : what the manifest says about the seeds.
    """

    measure: Callable[..., pd.DataFrame]
    cells: Sequence[Cell]
    seeds: str = "0 to 19"

    def rows(self, cell: Cell) -> pd.DataFrame:
        """The rows of one cell, with the cell's entries in front."""
        frame = self.measure(**cell)
        for position, (name, value) in enumerate(cell.items()):
            frame.insert(position, name, value)
        return frame


def code_digest() -> str:
    """A digest of the package's source: cells measured by other code are not taken up again."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "fa_study").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def run_sweep(name: str, sweep: Sweep, folder: Path = DATA) -> tuple[pd.DataFrame, float]:
    """All rows of a table, and the processor time that they took, interrupted runs included.

    Finished cells wait under `folder`/.cells until the table is stored.
    """
    store = folder / ".cells" / f"{name}-{code_digest()}"
    store.mkdir(parents=True, exist_ok=True)
    frames, seconds = [], 0.0
    for cell in tqdm(sweep.cells, desc=name, unit="cell"):
        key = hashlib.sha256(json.dumps(cell).encode()).hexdigest()[:16]
        path = store / f"{key}.parquet"
        if not path.exists():
            start = time.process_time()
            rows = sweep.rows(cell)
            rows.attrs["seconds"] = time.process_time() - start
            temporary = path.with_suffix(".part")
            rows.to_parquet(temporary, index=False)
            temporary.replace(path)
        rows = pd.read_parquet(path)
        seconds += rows.attrs.pop("seconds")
        frames.append(rows)
    return pd.concat(frames, ignore_index=True), seconds


def forget_cells(name: str, folder: Path = DATA) -> None:
    """Remove the finished cells of a table that has been stored."""
    for store in (folder / ".cells").glob(f"{name}-*"):
        shutil.rmtree(store)
