"""Rescaling or accumulator? Algorithms that round as Flash does but never rescale, beside those that do.

Flash differs from Baseline in two ways: it corrects its sums by exp(m_old - m_new) when the maximum grows, and it keeps
them in the tested format from tile to tile. The control knows the maximum of the row beforehand, so that every factor
is exactly 1 and only the second difference is left.
"""

from __future__ import annotations

from itertools import product

import pandas as pd
from torch import Tensor

from fa_study.attention import AttentionResult, baseline_attention, flash_attention, golden_attention
from fa_study.experiments.compare import ROWS, SEEDS, rms_per_seed
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.inputs import draw
from fa_study.experiments.sweep import Sweep
from fa_study.formats import parse_format, round_to
from fa_study.rounding import RoundingPolicy

# arm -> what it tells; in the order of the figure
ARMS = {
    "Baseline": "whole rows, one sum",
    "slabs": "sums rounded every Bc keys, no rescaling",
    "slabs, normalised": "and O normalised at every tile",
    "fa2": "slabs with rescaling",
    "fa1": "normalised slabs with rescaling",
    "fa4": "fa2 with rare rescaling",
    "fa1, FP32 sums": "fa1 with row sum and accumulator in FP32",
}


def without_rescaling(
    q: Tensor, k: Tensor, v: Tensor, *, policy: RoundingPolicy, Bc: int, normalised: bool, largest: Tensor
) -> AttentionResult:
    """Attention whose row sum and product with V are rounded every Bc keys, with the final maximum from the start.

    Parameters
    ----------
    largest : (B, H, L), the maximum of every row as the policy rounds it.
    normalised : divide O by the row sum at every tile, as FlashAttention 1 does, or once at the end.
    """
    column = largest.unsqueeze(-1)
    return flash_attention(
        q,
        k,
        v,
        policy=policy,
        tile=(ROWS, Bc),
        algorithm="fa1" if normalised else "fa2",
        shift=lambda scores, running: column.to(scores.dtype),
    )


def control_cell(*, distribution: str, N: int, Bc: int, format: str) -> pd.DataFrame:
    """The error of every arm against the golden value, a row per seed and arm; `unit` is u times the output's RMS."""
    q, k, v = (round_to(x, format) for x in draw(distribution, SEEDS, L=ROWS, S=N, D=64))
    golden = golden_attention(q, k, v).out
    policy = RoundingPolicy.uniform(format)
    baseline = baseline_attention(q, k, v, policy=policy)
    largest = baseline.max_scores
    tile = (ROWS, Bc)
    results = {
        "Baseline": baseline,
        "slabs": without_rescaling(q, k, v, policy=policy, Bc=Bc, normalised=False, largest=largest),
        "slabs, normalised": without_rescaling(q, k, v, policy=policy, Bc=Bc, normalised=True, largest=largest),
        **{a: flash_attention(q, k, v, policy=policy, tile=tile, algorithm=a) for a in ("fa2", "fa1", "fa4")},
        "fa1, FP32 sums": flash_attention(
            q, k, v, policy=policy.replace(sum="fp32", accumulator="fp32"), tile=tile, algorithm="fa1"
        ),
    }
    u = parse_format(format).unit_roundoff
    unit = [u * rms for rms in rms_per_seed(golden)]
    frames = [
        error_rows(
            difference(result.out, golden),
            SEEDS,
            arm=arm,
            unit=unit,
            rescalings=result.counts["rescalings"] / (len(SEEDS) * ROWS),
        )
        for arm, result in results.items()
    ]
    return pd.concat(frames, ignore_index=True)


CONTROL = Sweep(
    control_cell,
    [
        {"distribution": d, "N": N, "Bc": Bc, "format": f}
        for d, f, N, Bc in product(("normal", "uniform"), ("bf16", "fp16"), (1024, 4096), (16, 64, 256))
    ],
)


def rescaling_share(frame: pd.DataFrame) -> pd.DataFrame:
    """How much of what Flash adds to Baseline's mean squared error is there without rescaling, per setting and seed.

    share = (slabs^2 - Baseline^2) / (Flash^2 - Baseline^2), in squared RMS error; FlashAttention 1 is held against the
    normalised slabs.
    """
    keys = ["distribution", "N", "Bc", "format", "seed"]
    wide = frame.pivot_table(index=keys, columns="arm", values="rms") ** 2
    shares = [
        ((wide[slabs] - wide["Baseline"]) / (wide[flash] - wide["Baseline"]))
        .rename("share")
        .to_frame()
        .assign(algorithm=flash)
        for flash, slabs in (("fa1", "slabs, normalised"), ("fa2", "slabs"))
    ]
    return pd.concat(shares).reset_index()
