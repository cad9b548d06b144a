"""FP8 attention with attention sinks: the first keys have large scores, and the key order decides what underflows.

Shape letters: N keys, D head size.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import flash_attention, golden_attention
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.inputs import draw
from fa_study.experiments.sweep import Sweep
from fa_study.formats import FP8_E4M3, round_to
from fa_study.rounding import RoundingPolicy

SEEDS = tuple(range(20))
N, D, ROWS, TILE, SINKS = 2048, 64, 32, 128, 4
ORDERS = ("forward", "reverse")
SCALES = (1, 256)
# "3 to 10 times" less mean squared error at moderate sink strengths (arXiv 2606.06521, abstract).
PUBLISHED_FACTOR = (3.0, 10.0)
# The expected maximum of four standard normal scores, the abstract's delta_k of about 1.
DELTA_K = 1.0294


def predicted_flush(delta: np.ndarray | float, scale: float) -> np.ndarray:
    """The published share of weights outside the sinks that underflow in forward order.

    ``Phi(delta + delta_k - 6.93 - log(scale))`` with 6.93 = 10 log(2): e4m3 rounds to 0 up to 2^-10.
    """
    z = np.asarray(delta, dtype=float) + DELTA_K - 10 * math.log(2) - math.log(scale)
    return np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in np.atleast_1d(z)])


def _flushed(scores: Tensor, scale: float, order: str) -> list[float]:
    """Share of the weights outside the sinks (B, 1, L, N - SINKS) that e4m3 rounds to 0, per batch entry."""
    tiles = scores.unflatten(-1, (-1, TILE))
    peaks = tiles.amax(-1, keepdim=True)
    running = peaks.flip(-2).cummax(-2).values.flip(-2) if order == "reverse" else peaks.cummax(-2).values
    weights = scale * (tiles - running).exp().flatten(-2)[..., SINKS:]
    return (round_to(weights, FP8_E4M3) == 0).double().flatten(1).mean(1).tolist()


def sinks_cell(*, delta: int, sink_values: str) -> pd.DataFrame:
    """Errors with `delta` added to the scores of the first four keys. Q, K and V stay unrounded: P alone is in FP8.

    Parameters
    ----------
    sink_values : "ordinary": the sinks have values like other keys; "zero": they have none, as in trained models,
        where a sink is a place to put attention that should have no effect.

    Returns
    -------
    DataFrame : a row per seed, order and scale with the statistics of `error_rows`, the mean squared error `mse`, the
        RMS of the true output, and `flushed`, the share of weights outside the sinks that became 0.
    """
    q, k, v = draw("normal", SEEDS, L=ROWS, S=N, D=D)
    if sink_values == "zero":
        v[:, :, :SINKS] = 0
    bias = torch.zeros(1, 1, 1, N, dtype=torch.float64)
    bias[..., :SINKS] = delta
    golden = golden_attention(q, k, v, bias=bias).out
    scores = q @ k.mT * D**-0.5 + bias
    frames = []
    for order, scale in product(ORDERS, SCALES):
        result = flash_attention(
            q.float(),
            k.float(),
            v.float(),
            bias=bias.float(),
            policy=RoundingPolicy(probabilities=FP8_E4M3),
            tile=(ROWS, TILE),
            key_order=order,
            probability_scale=float(scale),
        )
        d = difference(result.out, golden)
        labels = {
            "order": order,
            "scale": scale,
            "mse": d.square().mean((1, 2, 3)).tolist(),
            "output_rms": golden.square().mean((1, 2, 3)).sqrt().tolist(),
            "flushed": _flushed(scores, scale, order),
        }
        frames.append(error_rows(d, SEEDS, **labels))
    return pd.concat(frames, ignore_index=True)


SINK_ORDER = Sweep(
    sinks_cell,
    [{"delta": delta, "sink_values": values} for values, delta in product(("ordinary", "zero"), range(13))],
)


def factors(frame: pd.DataFrame) -> pd.DataFrame:
    """By how much the mean squared error falls: median over the seeds of ratios within a seed.

    `order`: forward over reverse at scale 1. `scale`: 1 over 256 in forward order. `rest`: what reverse order still
    gains at scale 256.
    """
    wide = frame.pivot_table(index=["sink_values", "delta", "seed"], columns=["order", "scale"], values="mse")
    parts = {
        "order": wide["forward", 1] / wide["reverse", 1],
        "scale": wide["forward", 1] / wide["forward", 256],
        "rest": wide["forward", 256] / wide["reverse", 256],
    }
    long = pd.concat([x.rename("factor").reset_index().assign(change=name) for name, x in parts.items()])
    return long.reset_index(drop=True)
