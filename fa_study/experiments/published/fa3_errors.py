"""Table 3 of FlashAttention-3: RMS errors of FP16 and FP8 attention on inputs with rare outliers, over N and D.

Shape letters: N queries and keys of the tensors, of which ROWS queries are computed; D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import baseline_attention, flash_attention, golden_attention
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.inputs import draw
from fa_study.experiments.sweep import Sweep
from fa_study.formats import FP8_E4M3, round_to
from fa_study.quantize import hadamard, quantize
from fa_study.rounding import RoundingPolicy

SEEDS = tuple(range(12))
ROWS = 128
BLOCK = 128

# RMSE as printed (arXiv 2407.08608, Table 3). N and D are not given there, nor whether the true value is that of the
# inputs before or after their rounding.
PUBLISHED = {
    "FP16 standard": 3.2e-4,
    "FP16 Flash": 1.9e-4,
    "FP8 standard": 2.4e-2,
    "FP8 Flash, blocks and Hadamard": 9.1e-3,
    "FP8 Flash, Hadamard only": 9.3e-3,
    "FP8 Flash, blocks only": 2.4e-2,
}
# Published ratios: numerator, denominator, value.
RATIOS = {
    "FP16": ("FP16 standard", "FP16 Flash", 1.7),
    "FP8": ("FP8 standard", "FP8 Flash, blocks and Hadamard", 2.6),
}


def _per_tensor(x: Tensor) -> Tensor:
    return quantize(x, FP8_E4M3)


def _per_block(x: Tensor) -> Tensor:
    return quantize(x, FP8_E4M3, block=(BLOCK, None))


def _flash8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    policy = RoundingPolicy(probabilities=FP8_E4M3, output="fp16")
    return flash_attention(q, k, v, policy=policy, tile=(ROWS, BLOCK), probability_scale=256.0).out


def _standard8(q: Tensor, k: Tensor, v: Tensor, *, weights: str) -> Tensor:
    """Attention written out, the softmax in FP32; its result in FP16, or in e4m3 with one scale for the tensor."""
    p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    p = _per_tensor(p) if weights == "fp8" else round_to(p, "fp16")
    return round_to(p @ v, "fp16")


def fa3_cell(*, N: int, D: int, seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
    """Errors of all arms for one N and D.

    Returns
    -------
    DataFrame : `error_rows` per seed, arm and reference, where reference "original" is the truth for the inputs as
        drawn and "rounded" that for the inputs as the arm sees them; `output_rms` is the RMS of the former.
    """
    frames = []
    for seed in seeds:
        drawn = draw("outliers", [seed], L=N, S=N, D=D)
        original = golden_attention(drawn[0][:, :, :ROWS], *drawn[1:]).out
        q, k, v = (round_to(x, "fp16").float() for x in drawn)
        signs = 1.0 - 2.0 * torch.randint(0, 2, (D,), generator=torch.Generator().manual_seed(seed))
        mixed = (hadamard(q * signs), hadamard(k * signs), v)
        tensor, block = (tuple(scale(x) for x in (q, k, v)) for scale in (_per_tensor, _per_block))
        arms = {
            "FP16 standard": ((q, k, v), lambda *x: baseline_attention(*x, policy=RoundingPolicy.eager("fp16")).out),
            "FP16 Flash": (
                (q, k, v),
                lambda *x: flash_attention(*x, policy=RoundingPolicy.kernel("fp16"), tile=(ROWS, BLOCK)).out,
            ),
            "FP8 standard": (tensor, lambda *x: _standard8(*x, weights="fp8")),
            "FP8 standard, P in FP16": (tensor, lambda *x: _standard8(*x, weights="fp16")),
            "FP8 Flash, one scale": (tensor, _flash8),
            "FP8 Flash, blocks only": (block, _flash8),
            "FP8 Flash, Hadamard only": (tuple(_per_tensor(x) for x in mixed), _flash8),
            "FP8 Flash, blocks and Hadamard": (tuple(_per_block(x) for x in mixed), _flash8),
        }
        labels = {"output_rms": original.square().mean().sqrt().item()}
        for arm, (inputs, attend) in arms.items():
            seen = (inputs[0][:, :, :ROWS], *inputs[1:])
            out = attend(*seen)
            for reference, golden in (("original", original), ("rounded", golden_attention(*seen).out)):
                d = difference(out, golden)
                frames.append(error_rows(d, [seed], arm=arm, reference=reference, **labels))
    return pd.concat(frames, ignore_index=True)


FA3 = Sweep(
    fa3_cell,
    [{"N": N, "D": D} for N, D in product((512, 1024, 2048, 4096), (64, 128, 256))],
    seeds="0 to 11",
)


def pooled(frame: pd.DataFrame) -> pd.DataFrame:
    """RMSE over all seeds together, per N, D, reference and arm, with the smallest and largest seed."""
    grouped = frame.groupby(["N", "D", "reference", "arm"])["rms"]
    table = pd.DataFrame(
        {"rmse": grouped.apply(lambda x: (x**2).mean() ** 0.5), "low": grouped.min(), "high": grouped.max()}
    )
    return table.reset_index()


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """The two published ratios of pooled RMSE, standard over Flash, per N, D and reference, beside the published."""
    wide = pooled(frame).pivot_table(index=["N", "D", "reference"], columns="arm", values="rmse")
    parts = [
        pd.DataFrame({"format": name, "ratio": wide[top] / wide[bottom], "published": published}).reset_index()
        for name, (top, bottom, published) in RATIOS.items()
    ]
    return pd.concat(parts, ignore_index=True)
