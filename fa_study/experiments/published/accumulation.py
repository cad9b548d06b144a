"""Sums inside FP8 matrix products: 14 bits as on Hopper, with and without promotion to FP32.

Shape letters: a (M, K), b (K, M); every 32 terms are one instruction of the matrix unit.
"""

from __future__ import annotations

from itertools import product

import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import flash_attention, golden_attention
from fa_study.attention.products import matmul
from fa_study.experiments.sweep import Sweep
from fa_study.formats import FP8_E4M3, round_to
from fa_study.rounding import Accumulation, RoundingPolicy

SEEDS = tuple(range(10))
M = 32
STEP, BITS = 32, 13
PROMOTIONS: tuple[int | None, ...] = (None, 128, 32)
# "A maximum relative error of nearly 2 %" for K = 4096 (DeepSeek-V3, section 3.3.2); promotion every 128 there.
PUBLISHED_ERROR, PUBLISHED_K = 0.02, 4096


def aligned_product(a: Tensor, b: Tensor, promote: int | None = None) -> Tensor:
    """a @ b as DeepSeek-V3 describes Hopper's units: every addend is cut before it is added.

    The products of 32 terms and the running sum are aligned to the largest of them and cut (toward zero) 13 bits below
    its leading bit, then added exactly, and the sum is cut to 14 bits. `fa_study.attention.products.matmul` cuts only
    the sum.

    Parameters
    ----------
    a, b : (M, K), (K, M) in float64, values of FP8.
    promote : terms after which the sum is added to an FP32 total; None: never.
    """
    total = a.new_zeros(a.shape[0], b.shape[1])
    partial = total
    for k in range(0, a.shape[1], STEP):
        terms = torch.cat([a[:, None, k : k + STEP] * b.mT[None, :, k : k + STEP], partial[..., None]], -1)
        partial = _cut(_cut(terms, terms.abs().amax(-1, keepdim=True)).sum(-1))
        if promote and (k + STEP) % promote == 0:
            total, partial = (total + partial).float().double(), torch.zeros_like(partial)
    return total + partial


def _cut(x: Tensor, leader: Tensor | None = None) -> Tensor:
    """x cut toward zero to multiples of 2^-13 times the power of two at or below |leader| (x itself if None)."""
    _, exponent = torch.frexp(x if leader is None else leader)
    quantum = torch.pow(2.0, (exponent - 1 - BITS).double())
    return (x / quantum).trunc() * quantum


def _draw(inputs: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=generator) if inputs == "normal" else torch.rand(shape, generator=generator)
    return round_to(drawn, FP8_E4M3)


def _accumulations() -> dict[tuple[str, int], Accumulation]:
    """(how, promotion) -> the emulation's accumulation; promotion 0 stands for none."""
    narrow = {("sum cut", p or 0): Accumulation(f"e8m{BITS}:toward_zero", every=STEP, promote=p) for p in PROMOTIONS}
    return {("FP32", 0): Accumulation("fp32"), **narrow}


def product_cell(*, inputs: str, K: int) -> pd.DataFrame:
    """Errors of products of FP8 matrices, `inputs` "normal" or "uniform" in [0, 1).

    Returns
    -------
    DataFrame : a row per seed, way of adding and promotion (0: none). `largest`: largest relative error of an element;
        `scaled`: largest error over the RMS of the product; `rms`, `mean`: RMS and signed mean error over that RMS.
    """
    rows = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        a, b = _draw(inputs, (M, K), generator), _draw(inputs, (K, M), generator)
        exact = a.double() @ b.double()
        results = {key: matmul(a, b, how).double() for key, how in _accumulations().items()}
        for p in PROMOTIONS:
            results["addends cut", p or 0] = aligned_product(a.double(), b.double(), p)
        for (how, promotion), result in results.items():
            d, size = result - exact, exact.square().mean().sqrt()
            rows.append(
                {
                    "seed": seed,
                    "how": how,
                    "promotion": promotion,
                    "largest": (d / exact).abs().max().item(),
                    "scaled": (d.abs().max() / size).item(),
                    "rms": (d.square().mean().sqrt() / size).item(),
                    "mean": (d.mean() / size).item(),
                }
            )
    return pd.DataFrame(rows)


def attention_cell(*, values: str, N: int) -> pd.DataFrame:
    """The same sums inside attention: one key tile over all N keys, so that the product with V has N terms.

    Returns
    -------
    DataFrame : a row per seed, way of adding and promotion with `rms` and `mean`, the RMS and the signed mean error
        over the RMS of the output. Inputs are FP8 values and count as exact; P is in FP8 as well.
    """
    frames = []
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    q, k = (torch.stack([_draw("normal", (1, n, 64), g) for g in generators]) for n in (M, N))
    v = torch.stack([_draw(values, (1, N, 64), g) for g in generators])
    golden = golden_attention(q, k, v).out
    size = golden.square().mean((1, 2, 3)).sqrt()
    for (how, promotion), accumulation in _accumulations().items():
        policy = RoundingPolicy(probabilities=FP8_E4M3, products=accumulation)
        d = flash_attention(q, k, v, policy=policy, tile=(M, N), probability_scale=256.0).out.double() - golden
        rms, mean = d.square().mean((1, 2, 3)).sqrt() / size, d.mean((1, 2, 3)) / size
        frames.append(pd.DataFrame({"seed": SEEDS, "how": how, "promotion": promotion, "rms": rms, "mean": mean}))
    return pd.concat(frames, ignore_index=True)


PRODUCTS = Sweep(
    product_cell,
    [{"inputs": i, "K": K} for i, K in product(("normal", "uniform"), (128, 256, 512, 1024, 2048, 4096))],
    seeds="0 to 9",
)
ATTENTION = Sweep(
    attention_cell,
    [{"values": v, "N": N} for v, N in product(("normal", "uniform"), (512, 2048))],
    seeds="0 to 9",
)
