"""When does Flash deviate ten times more than Baseline? The ratio of errors over inputs, N, Bc, algorithm and D."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd

from fa_study.experiments.compare import compare
from fa_study.experiments.inputs import DISTRIBUTIONS
from fa_study.experiments.sweep import Sweep

# study -> (algorithms, Bc)
STUDIES = {
    "grid": (("fa1",), (16, 32, 64, 128, 256, 512)),
    "algorithms": (("fa1", "fa2", "fa4"), (16, 64, 256)),
    "heads": (("fa1",), (16, 64, 256)),
    "kernel": (("fa2",), (16, 64, 256)),
}
LENGTHS = tuple(2**i for i in range(8, 14))


def ten_times_cell(*, study: str, distribution: str, N: int, format: str, D: int) -> pd.DataFrame:
    """One cell of a study; tiles larger than N are left out."""
    if study not in STUDIES:
        raise ValueError(f"study={study!r} is unknown: use one of {', '.join(STUDIES)}")
    algorithms, tiles = STUDIES[study]
    frame = compare(
        distribution=distribution,
        N=N,
        format=format,
        family="kernel" if study == "kernel" else "uniform",
        D=D,
        tiles=[Bc for Bc in tiles if Bc <= N],
        algorithms=algorithms,
    )
    # Only the errors of each are wanted here, not the distance between them.
    return frame[frame["against"] == "golden"].drop(columns=["against", "reference"])


def _cells() -> list[dict]:
    sizes = {"grid": (LENGTHS, (64,)), "algorithms": ((1024, 4096), (64,)), "heads": ((1024, 4096), (32, 128))}
    sizes["kernel"] = sizes["algorithms"]
    return [
        {"study": study, "distribution": d, "N": N, "format": f, "D": D}
        for study, (lengths, heads) in sizes.items()
        for d, f, N, D in product(DISTRIBUTIONS, ("bf16", "fp16"), lengths, heads)
        if f == "bf16" or N in (1024, 4096)
    ]


TEN_TIMES = Sweep(ten_times_cell, _cells())
# On the inputs of a trained model, whose samples take the place of the seeds.
TRAINED = Sweep(
    ten_times_cell,
    [
        {"study": study, "distribution": "trained", "N": N, "format": f, "D": 64}
        for study, lengths in (("grid", (256, 512, 1024)), ("algorithms", (1024,)), ("kernel", (1024,)))
        for f, N in product(("bf16", "fp16"), lengths)
    ],
    seeds="samples 0 to 19 of trained_qkv.parquet",
)


def ratios(frame: pd.DataFrame, statistic: str = "rms") -> pd.DataFrame:
    """Error of Flash over that of Baseline on the same inputs, a row per seed and setting of Flash, with its family."""
    keys = ["study", "distribution", "N", "format", "D", "seed"]
    baseline = frame.loc[frame["method"] == "Baseline", [*keys, statistic]].rename(columns={statistic: "baseline"})
    merged = frame[frame["method"] == "Flash"].merge(baseline, on=keys)
    family = np.where(merged["study"] == "kernel", "kernel", "uniform")
    return merged.assign(ratio=merged[statistic] / merged["baseline"], family=family)
