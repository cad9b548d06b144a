"""The biased rounding of arXiv 2510.04212: rows whose maximum occurs twice, values of one sign, O in BF16.

With P = 1 at both maxima their values add up to a number with one bit more than BF16 holds: a tie, half of the time.
What the other keys add, however little, decides every tie in the same direction.

Shape letters: B seeds, L queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import attention_gradients, flash_attention, golden_attention
from fa_study.experiments.sweep import Sweep
from fa_study.formats import BF16, round_to
from fa_study.rounding import RoundingPolicy

SEEDS = tuple(range(20))
L, S, D = 32, 64, 64
# The authors' code (github.com/ucker/why-low-precision-training-fails) takes 2, and counts scores as equal to the
# maximum if they lie within 1e-3 of it.
BETA, CLOSE = 2.0, 1e-3

# name -> (O kept in BF16, rounding, shift)
ARMS = {
    "O in BF16": ("bf16", "nearest_even", False),
    "O in BF16, their shift": ("bf16", "nearest_even", True),
    "O in BF16, stochastic": ("bf16", "stochastic", False),
    "O in FP32": ("fp32", "nearest_even", False),
}


def repeated_maximum_shift(beta: float = BETA) -> Callable[[Tensor, Tensor], Tensor]:
    """The authors' remedy as a `shift` of `flash_attention`.

    Where a tile's maximum m occurs more than once, beta m is subtracted instead of m if m > 0, and 0 if m < 0, so that
    P is 1 nowhere.
    """

    def shift(scores: Tensor, running_max: Tensor) -> Tensor:
        top = scores.amax(-1, keepdim=True)
        repeated = (scores >= top - CLOSE).sum(-1, keepdim=True) > 1
        wanted = torch.where(top > 0, beta * top, torch.zeros_like(top))
        return torch.where(repeated, torch.maximum(wanted, running_max), running_max)

    return shift


def rows_with_maxima(repeats: int, rest: float, seed: int) -> Tensor:
    """Scores (1, L, S): `repeats` equal maxima between 2 and 6; the other keys weigh `rest` of one maximum in all."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 + 4 * torch.rand(1, L, 1, generator=generator, dtype=torch.float64)
    others = torch.randn(1, L, S, generator=generator, dtype=torch.float64)
    others[..., :repeats] = -torch.inf
    scores = others - others.logsumexp(-1, keepdim=True) + top + torch.tensor(rest, dtype=torch.float64).log()
    scores[..., :repeats] = top
    return scores


def _inputs(values: str, repeats: int, rest: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, bias, dout): q is 0, so that the bias alone makes the scores."""
    bias = torch.stack([rows_with_maxima(repeats, rest, seed) for seed in SEEDS]).float()
    generators = [torch.Generator().manual_seed(10_000 + seed) for seed in SEEDS]
    k, v = (torch.stack([torch.randn(1, S, D, generator=g) for g in generators]) for _ in range(2))
    dout = -torch.stack([torch.randn(1, L, D, generator=g).abs() for g in generators])
    if values == "one sign":
        v = -v.abs()
    return torch.zeros(len(SEEDS), 1, L, D), round_to(k, BF16), round_to(v, BF16), bias, round_to(dout, BF16)


def _signed(d: Tensor, size: Tensor) -> list[float]:
    """Mean of d over mean of size in units of BF16's roundoff, per seed."""
    return (d.flatten(1).mean(1) / size.flatten(1).abs().mean(1) / BF16.unit_roundoff).tolist()


def bias_cell(*, values: str, repeats: int, rest: float) -> pd.DataFrame:
    """Signed errors of the output and of delta.

    Returns
    -------
    DataFrame : a row per seed and arm. `mean`, `rms`: signed mean and RMS of the output's error over the mean
        |true output|, in units of u = 2^-8. `delta_output`, `delta_probabilities`: mean error of delta as it enters
        dQ, over mean rowsum |dO O|, in units of u, with delta = rowsum(dO O) or rowsum(P dP). dO is negative, as the
        values are where they have one sign.
    """
    q, k, v, bias, dout = _inputs(values, repeats, rest)
    golden = golden_attention(q, k, v, bias=bias).out
    # dQ = scale (P (dP - delta)) K: an error of delta moves each row of dQ along P K, by which it can be read off.
    along = golden_attention(q, k, k, bias=bias).out
    exact_q = q.double().requires_grad_()
    (golden_attention(exact_q, k, v, bias=bias).out * dout).sum().backward()
    size = (dout.double() * golden).abs().sum(-1)
    frames = []
    for arm, (accumulator, mode, shifted) in ARMS.items():
        narrow = f"bf16:{mode}"
        policy = RoundingPolicy(
            inputs=BF16,
            probabilities=narrow,
            accumulator=narrow if accumulator == "bf16" else "fp32",
            output=narrow,
            delta="fp32",
        )
        options = {
            "policy": policy,
            "bias": bias,
            "tile": (L, S),
            "shift": repeated_maximum_shift() if shifted else None,
        }
        out = flash_attention(q, k, v, generator=torch.Generator().manual_seed(repeats), **options).out.double()
        columns = {
            "mean": _signed(out - golden, golden),
            "rms": ((out - golden).square().flatten(1).mean(1).sqrt() / golden.abs().flatten(1).mean(1))
            .div(BF16.unit_roundoff)
            .tolist(),
        }
        for delta in ("output", "probabilities"):
            dq, _, _ = attention_gradients(
                q, k, v, dout, delta=delta, generator=torch.Generator().manual_seed(repeats), **options
            )
            moved = ((dq.double() - exact_q.grad) * along).sum(-1) / along.square().sum(-1)
            columns[f"delta_{delta}"] = _signed(-moved * D**0.5, size)
        frames.append(pd.DataFrame({"seed": SEEDS, "arm": arm, **columns}))
    return pd.concat(frames, ignore_index=True)


RESTS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
BIAS = Sweep(
    bias_cell,
    [{"values": v, "repeats": n, "rest": r} for v, n, r in product(("one sign", "both signs"), (1, 2, 3, 4), RESTS)],
)


def limits_cell(*, beta: float) -> pd.DataFrame:
    """How large a repeated maximum may be under the shift, all else in FP32: a row per maximum.

    Returns
    -------
    DataFrame : the maximum, the relative RMS error of its row (infinite or NaN where the output is) and whether the row
        sum is a normal FP32 number.
    """
    tops = torch.arange(4, 120, 0.25)
    bias = (tops - 3).view(1, 1, -1, 1).repeat(1, 1, 1, S)
    bias[..., :2] = tops.view(1, 1, -1, 1)
    q, k = torch.zeros(1, 1, len(tops), D), torch.zeros(1, 1, S, D)
    v = torch.randn(1, 1, S, D, generator=torch.Generator().manual_seed(0))
    golden = golden_attention(q, k, v, bias=bias).out
    result = flash_attention(
        q, k, v, bias=bias, policy=RoundingPolicy(), tile=(16, S), shift=repeated_maximum_shift(beta)
    )
    error = (result.out.double() - golden).square().mean(-1).sqrt() / golden.square().mean(-1).sqrt()
    # ln l = lse - beta m, computed without l itself.
    exact = golden_attention(q, k, v, bias=bias).lse - beta * tops
    normal = exact >= torch.log(torch.tensor(torch.finfo(torch.float32).tiny, dtype=torch.float64))
    return pd.DataFrame({"maximum": tops.double(), "error": error[0, 0], "normal": normal[0, 0]})


LIMITS = Sweep(limits_cell, [{"beta": b} for b in (2.0, 4.0, 7.0, 8.0)], seeds="none: only the values are random, by 0")


def predicted_limit(beta: float) -> float:
    """The largest maximum whose P = exp(m - beta m) is a normal FP32 number: 126 log(2) / (beta - 1)."""
    return float(126 * torch.log(torch.tensor(2.0, dtype=torch.float64)) / (beta - 1))


def limits(frame: pd.DataFrame) -> pd.DataFrame:
    """Per beta: up to which maximum P is normal by the formula, and from which one the output is no number."""
    failed = frame[~(frame["error"] < 1e-2)].groupby("beta")["maximum"].min()
    return pd.DataFrame({"P is normal up to": [predicted_limit(b) for b in failed.index], "fails from": failed})
