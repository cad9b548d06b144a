"""FP8 attention whose running maximum lags: P scaled by 2^8 saturates where the maximum may lag by more than 0.807.

Shape letters: N keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import torch

from fa_study.attention import flash_attention, golden_attention
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.sweep import Sweep
from fa_study.formats import FP8_E4M3, round_to
from fa_study.rounding import RoundingPolicy

SEEDS = tuple(range(10))
N, D, ROWS, TILE = 8192, 128, 32, 128

# Relative errors against the 16-bit kernel, measured by users on a B300 GPU with 8,192 keys and a threshold of 4
# (github.com/Dao-AILab/flash-attention, pull request 2694). Offset -> standard deviation of the logits -> error.
PUBLISHED = {
    8: {0.25: 0.027, 0.5: 0.031, 1.0: 0.136, 1.5: 0.305, 2.0: 0.361},
    4: {0.25: 0.027, 0.5: 0.028, 1.0: 0.027, 1.5: 0.024, 2.0: 0.022},
}
# (offset: P is scaled by 2 to it, threshold: growth of the maximum in log2 units that skips the rescaling)
SETTINGS = ((8, 4.0), (8, 0.75), (8, 0.0), (4, 4.0))
# The most the maximum may lag, in log2 units, before P times 2^8 leaves the range of e4m3.
ROOM = math.log2(FP8_E4M3.max) - 8


def rescaling_cell(*, std: float, seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
    """Errors for logits with standard deviation `std`; inputs are FP8 values, as in the published measurement.

    Returns
    -------
    DataFrame : a row per seed, offset and threshold with the statistics of `error_rows`, the RMS and the mean magnitude
        of the true output, and per query row how many weights saturated and how often the maximum was renewed.
    """
    frames = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (round_to(torch.randn(1, 1, n, D, generator=generator).clamp_(-3, 3), FP8_E4M3) for n in (ROWS, N, N))
        scale = std / math.sqrt(D)
        golden = golden_attention(q, k, v, scale=scale).out
        for offset, threshold in SETTINGS:
            result = flash_attention(
                q,
                k,
                v,
                scale=scale,
                policy=RoundingPolicy(probabilities=FP8_E4M3, output="bf16"),
                tile=(ROWS, TILE),
                algorithm="fa4",
                rescale_threshold=threshold,
                probability_scale=2.0**offset,
            )
            labels = {
                "offset": offset,
                "threshold": threshold,
                "output_rms": golden.square().mean().sqrt().item(),
                "output_mean_abs": golden.abs().mean().item(),
                "saturated": result.counts["overflows"]["probabilities"] / ROWS,
                "renewals": result.counts["rescalings"] / ROWS,
            }
            frames.append(error_rows(difference(result.out, golden), [seed], **labels))
    return pd.concat(frames, ignore_index=True)


RESCALING = Sweep(rescaling_cell, [{"std": std} for std in PUBLISHED[8]], seeds="0 to 9")


def relative(frame: pd.DataFrame) -> pd.DataFrame:
    """`l2` (RMS error over RMS of the output) and `l1` (means of magnitudes): the published error is one of them."""
    return frame.assign(l2=frame["rms"] / frame["output_rms"], l1=frame["mean_abs"] / frame["output_mean_abs"])


def beside_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Median over the seeds of both errors beside the published ones, for the two published settings."""
    shown = relative(frame[frame["threshold"] == 4])
    table = shown.groupby(["offset", "std"])[["l1", "l2", "saturated"]].median().reset_index()
    table["published"] = [PUBLISHED[row.offset][row.std] for row in table.itertuples()]
    return table
