"""FP8 (e4m3): what happens without scales, and what scales give back.

Shape letters: N keys, Bc keys of a tile, P probabilities.
"""

from __future__ import annotations

from itertools import product

import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import baseline_attention, flash_attention, golden_attention
from fa_study.experiments.compare import ROWS, SEEDS, rms_per_seed
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.inputs import draw
from fa_study.experiments.sweep import Sweep
from fa_study.formats import FP8_E4M3, round_to
from fa_study.quantize import quantize
from fa_study.rounding import RoundingPolicy

Bc = 64
# P in e4m3, all else as a kernel keeps it.
_POLICY = RoundingPolicy(probabilities=FP8_E4M3, output="fp16")


def flushed(probabilities: Tensor) -> list[float]:
    """Share of the probabilities (B, ...) other than 0 that e4m3 rounds to 0, per batch entry."""
    lost = (round_to(probabilities, FP8_E4M3) == 0) & (probabilities > 0)
    return lost.double().flatten(1).mean(1).tolist()


def fp8_cell(*, distribution: str, N: int) -> pd.DataFrame:
    """Errors of four computations with inputs and P in e4m3, each against the golden value of the unrounded inputs.

    Returns
    -------
    DataFrame : a row per seed and arm, with the statistics of `error_rows`, the RMS of the true output and `flushed`,
        the share of P that becomes 0.
    """
    q, k, v = draw(distribution, SEEDS, L=ROWS, S=N, D=64)
    golden = golden_attention(q, k, v).out
    plain = tuple(round_to(x, FP8_E4M3).float() for x in (q, k, v))
    tensor = tuple(torch.cat([quantize(x[i : i + 1], FP8_E4M3).float() for i in range(len(x))]) for x in (q, k, v))
    block = tuple(quantize(x, FP8_E4M3, block=(64, None)).float() for x in (q, k, v))

    s = q @ k.mT / q.shape[-1] ** 0.5
    p = torch.softmax(s, -1)
    running = torch.cummax(s.unflatten(-1, (-1, min(Bc, N))).amax(-1), -1).values
    e = (s.unflatten(-1, (-1, min(Bc, N))) - running.unsqueeze(-1)).exp().flatten(-2)
    tile = {"algorithm": "fa2", "tile": (ROWS, Bc)}
    arms = {
        "Baseline, no scales": (baseline_attention(*plain, policy=_POLICY), p),
        "Baseline, scale per tensor": (baseline_attention(*tensor, policy=_POLICY), p),
        "Flash, no scales": (flash_attention(*plain, policy=_POLICY, **tile), e),
        "Flash, scale per block, P x 256": (
            flash_attention(*block, policy=_POLICY, probability_scale=256.0, **tile),
            256 * e,
        ),
    }
    labels = {"output_rms": rms_per_seed(golden)}
    frames = [
        error_rows(difference(result.out, golden), SEEDS, arm=arm, flushed=flushed(weights), **labels)
        for arm, (result, weights) in arms.items()
    ]
    return pd.concat(frames, ignore_index=True)


FP8 = Sweep(
    fp8_cell,
    [{"distribution": d, "N": N} for d, N in product(("normal", "uniform", "outliers"), (2**i for i in range(7, 14)))],
)
