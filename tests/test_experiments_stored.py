"""A stored table is what the code computes today: one cell of each is measured again, chosen by a printed seed."""

import os
import random
import time

import pandas as pd
import pytest
import torch

from fa_study.experiments.__main__ import TABLES
from fa_study.tables import machine, read_manifest, read_table

# The tables of published numbers have a test of their own kind in test_published.py.
OWN = [name for name in TABLES if not name.startswith("published")]
SEED = int(os.environ.get("CELL_SEED", time.time_ns() % 1_000_000))


def check_cell(name, cell):
    stored, entry = read_table(name), read_manifest()[name]
    for key, value in cell.items():
        stored = stored[stored[key] == value]
    threads = torch.get_num_threads()
    torch.set_num_threads(entry["threads"])
    fresh = TABLES[name].rows(cell)
    torch.set_num_threads(threads)
    stored, fresh = stored.reset_index(drop=True), fresh[stored.columns].reset_index(drop=True)
    if machine() == entry["machine"] and entry["torch"] == torch.__version__:
        pd.testing.assert_frame_equal(fresh, stored, check_exact=True, check_dtype=False)
        return
    names = [c for c in stored.columns if not pd.api.types.is_numeric_dtype(stored[c])]
    labels = [*names, *(c for c in ("Bc",) if c in stored.columns)]
    # In FP32 the order of sums is all the error there is. `tile_products.slab` lets a processor add 128 to 256 terms in
    # one chain, and the error of a chain grows like the square root of its length.
    slack = 2**0.5 if cell.get("format") == "fp32" else 1.0
    for statistic in ("max", "rms"):
        band = stored.groupby(labels)[statistic].agg(["min", "max"])
        median = fresh.groupby(labels)[statistic].median()
        assert median.between(band["min"] / slack, band["max"] * slack).all(), (
            f"{name} {cell}: {statistic} outside the stored band"
        )


@pytest.mark.parametrize("name", OWN)
def test_one_cell_comes_out_again(name):
    """A small one, for the sake of time; the slow test takes any."""
    sizes = [cell.get("N", 0) for cell in TABLES[name].cells]
    cells = [cell for cell, N in zip(TABLES[name].cells, sizes) if max(1024, min(sizes)) >= N]
    cell = random.Random(SEED).choice(cells)
    print(f"CELL_SEED={SEED}: {name} {cell}")
    check_cell(name, cell)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_ten_cells_of_any_size_come_out_again(name):
    print(f"CELL_SEED={SEED}")
    for cell in random.Random(SEED).sample(list(TABLES[name].cells), 10):
        check_cell(name, cell)


def test_every_table_is_stored_with_all_cells_of_its_sweep():
    assert set(TABLES) <= set(read_manifest())
    for name, sweep in TABLES.items():
        keys = list(sweep.cells[0])
        stored = read_table(name)
        assert set(stored[keys].drop_duplicates().itertuples(index=False, name=None)) == {
            tuple(cell.values()) for cell in sweep.cells
        }, name
        assert name not in OWN or stored["seed"].nunique() >= 20, name
