"""Figure 6: what swapping the block dimensions, square tiles and larger blocks do to the deviation.

Br x Bc rows and keys of a tile, D head size, M elements of fast memory, T = N / Bc key tiles.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pandas as pd

from fa_study.experiments.compare import ARMS, compare
from fa_study.experiments.sweep import Sweep
from fa_study.experiments.tiling import block_sizes

N, D = 2048, 64
MEMORIES = tuple(4 * D * Bc for Bc in (8, 16, 32, 64, 128, 256, 512, 1024))
VARIANTS = ("as published", "swapped", "square, same Bc", "square, same area")


def block_variants() -> pd.DataFrame:
    """Br, Bc and area of every variant for every fast memory M.

    "as published": Bc = ceil(M / 4D), Br = min(Bc, D). "swapped": the other way round. What the paper's square tiles
    keep is unknown: here either Bc, or the area.
    """
    rows = []
    for M in MEMORIES:
        Br, Bc = block_sizes(M, D)
        side = round(math.sqrt(Br * Bc))
        for variant, tile in zip(VARIANTS, ((Br, Bc), (Bc, Br), (Bc, Bc), (side, side))):
            rows.append({"variant": variant, "M": M, "Br": tile[0], "Bc": tile[1], "area": tile[0] * tile[1]})
    return pd.DataFrame(rows)


TILES = tuple(sorted(set(block_variants()["Bc"])))
BLOCKS = Sweep(
    partial(compare, tiles=TILES, algorithms=("fa1",), rows=64),
    [
        {"distribution": d, "N": N, "family": y, "format": f}
        for d, (y, f) in product(("normal", "uniform", "outliers"), ARMS)
    ],
)


def by_variant(frame: pd.DataFrame) -> pd.DataFrame:
    """The table's Flash rows, repeated for every variant and memory that leads to their Bc.

    Br changes no bit, so one measurement per Bc is enough; the count of tiles is per row of queries, T = ceil(N / Bc).
    """
    flash = frame[frame["method"] == "Flash"]
    merged = block_variants().merge(flash, on="Bc")
    return merged.assign(T=-(-merged["N"] // merged["Bc"]))


def paired_ratios(frame: pd.DataFrame, variant: str, statistic: str = "rms") -> pd.DataFrame:
    """Per memory and seed, the statistic with `variant` over that with the published block sizes."""
    keys = ["distribution", "family", "format", "against", "M", "seed"]
    wide = by_variant(frame).pivot_table(index=keys, columns="variant", values=[statistic, "Bc"])
    result = (wide[statistic, variant] / wide[statistic, "as published"]).rename("ratio").to_frame()
    result["Bc"], result["Bc_published"] = wide["Bc", variant], wide["Bc", "as published"]
    return result.reset_index()
