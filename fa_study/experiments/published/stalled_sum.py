"""The running sum that stops growing: BF16 at 256, FP16 at 2,048, if keys are added one by one.

At 256 the distance of BF16 numbers is 2, so that adding 1 is a tie, which goes to the even neighbour: back to 256.

Shape letters: B seeds, L queries, N keys, Bc keys of a tile.
"""

from __future__ import annotations

from itertools import product

import pandas as pd
import torch

from fa_study.attention import flash_attention, golden_attention
from fa_study.experiments.sweep import Sweep
from fa_study.formats import parse_format
from fa_study.rounding import RoundingPolicy, parse_rounding

SEEDS = tuple(range(4))
L, D = 16, 16
ROUNDINGS = ("bf16", "fp16", "bf16:stochastic")
# The first even number at which adding 1 changes nothing.
STOPS = {"bf16": 256, "fp16": 2048}


def stop(fmt: str) -> int:
    """2^(fraction bits + 1): where the distance of neighbours is 2 and a sum of ones stops, rounding to nearest."""
    return 2 ** (parse_format(fmt).mantissa_bits + 1)


def stalled_cell(*, rounding: str, scores: str, Bc: int, N: int) -> pd.DataFrame:
    """The row sum l and the output when l alone, or l and O, are kept in the format.

    Parameters
    ----------
    scores : "equal": all weights are 1; "normal": scores are N(0, 1).

    Returns
    -------
    DataFrame : a row per seed and narrow site ("sum", "sum and O") with `sum`, the mean l / true l, and `output`, the
        mean of out / true out; values are uniform in [0, 1), so that the true output is near 1/2.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    size = 0.0 if scores == "equal" else 1.0
    q, k = (size * torch.stack([torch.randn(1, n, D, generator=g) for g in generators]) for n in (L, N))
    v = torch.stack([torch.rand(1, N, D, generator=g) for g in generators])
    golden = golden_attention(q, k, v)
    frames = []
    for site, policy in {
        "sum": RoundingPolicy(sum=parse_rounding(rounding)),
        "sum and O": RoundingPolicy(sum=parse_rounding(rounding), accumulator=parse_rounding(rounding)),
    }.items():
        result = flash_attention(q, k, v, policy=policy, tile=(L, Bc), generator=torch.Generator().manual_seed(N))
        ratio = (result.lse.double() - golden.lse).exp()
        frames.append(
            pd.DataFrame(
                {
                    "seed": SEEDS,
                    "site": site,
                    "sum": ratio.flatten(1).mean(1).tolist(),
                    "output": (result.out.double() / golden.out).flatten(1).mean(1).tolist(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


STALLED = Sweep(
    stalled_cell,
    [
        {"rounding": r, "scores": s, "Bc": Bc, "N": N}
        for r, s, Bc, N in product(ROUNDINGS, ("equal", "normal"), (1, 16, 64), (64, 128, 256, 512, 1024, 2048, 4096))
    ]
    + [{"rounding": "bf16", "scores": "equal", "Bc": 16, "N": 8192}],
    seeds="0 to 3",
)
