"""The micro-benchmark: Flash and Baseline on the same inputs, against each other and against the truth.

Shape letters: N keys, D head size, Br x Bc rows and keys of a tile. The query rows are a fixed few, whatever N is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa_study.attention import baseline_attention, flash_attention, golden_attention
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.exact import extended_attention
from fa_study.experiments.inputs import draw
from fa_study.formats import parse_format, round_to
from fa_study.rounding import RoundingPolicy

SEEDS = tuple(range(20))
# Query rows: enough for an error's size, whose spread over the seeds is what the bands show.
ROWS = 32
FAMILIES = ("uniform", "kernel")
# The four formats of the paper; from FP32 on the two families are the same.
ARMS = (
    ("uniform", "bf16"),
    ("uniform", "fp16"),
    ("uniform", "fp32"),
    ("uniform", "fp64"),
    ("kernel", "bf16"),
    ("kernel", "fp16"),
)


def policies(family: str, fmt: str) -> tuple[RoundingPolicy, RoundingPolicy]:
    """(Flash's policy, Baseline's) of a family.

    "uniform": every intermediate in the format, as in the paper's re-implementation. "kernel": what GPUs run, a fused
    kernel that is FP32 inside against attention written out in the format with an FP32 softmax.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is unknown: use one of {', '.join(FAMILIES)}")
    # From FP32 on there is nothing narrower left to distinguish the two.
    if family == "uniform" or parse_format(fmt).mantissa_bits > 10:
        return RoundingPolicy.uniform(fmt), RoundingPolicy.uniform(fmt)
    return RoundingPolicy.kernel(fmt), RoundingPolicy.eager(fmt)


def truth(q: Tensor, k: Tensor, v: Tensor, fmt: str, extended: bool) -> Tensor | np.ndarray:
    """The golden value in FP64; where the format under test is FP64 itself, in extended precision if that is wanted."""
    if extended and parse_format(fmt).mantissa_bits > 24:
        return extended_attention(q, k, v)
    return golden_attention(q, k, v).out


def rms_per_seed(x: Tensor | np.ndarray) -> list[float]:
    """Root of the mean square of each entry of the first dimension."""
    flat = torch.as_tensor(np.asarray(x, dtype=np.float64)).flatten(1)
    return flat.square().mean(1).sqrt().tolist()


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """PyTorch's own CPU flash kernel; an error where it cannot run."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype))


def compare(
    *,
    distribution: str,
    N: int,
    format: str,
    family: str,
    D: int = 64,
    tiles: Sequence[int] = (64,),
    algorithms: Sequence[str] = ("fa1",),
    references: Sequence[str] = ("rounded",),
    kernel: bool = False,
    rows: int = ROWS,
    extended: bool = True,
    seeds: Sequence[int] = SEEDS,
) -> pd.DataFrame:
    """One cell of the micro-benchmark.

    Parameters
    ----------
    distribution, N, D : the inputs, see `fa_study.experiments.inputs.draw`.
    format, family : what is rounded where, see `policies`.
    tiles : the Bc to try. Br groups rows and changes no bit of a result: it is `rows` here.
    algorithms : of "fa1", "fa2", "fa4".
    references : "rounded": the truth for the inputs after their rounding to the format, which judges the attention
        alone; "original": for the inputs before it.
    kernel : add PyTorch's CPU flash kernel as the algorithm "torch".
    rows : number of query rows. A larger number has a larger maximum error.
    extended : judge FP64 in extended precision, which is slow; False: not where only Flash against Baseline matters.

    Returns
    -------
    DataFrame : a row per seed, method ("Flash", "Baseline"), algorithm ("" for Baseline), Bc (0 for Baseline and the
        real kernel), against ("golden", "Baseline") and reference, with the statistics of `error_rows`, the RMS of the
        true output, and rescalings per row.
    """
    flash_policy, baseline_policy = policies(family, format)
    q, k, v = draw(distribution, seeds, L=rows, S=N, D=D)
    inputs = {"original": (q, k, v), "rounded": tuple(round_to(x, format) for x in (q, k, v))}
    goldens = {reference: truth(*inputs[reference], format, extended) for reference in references}
    q, k, v = inputs["rounded"]

    baseline = baseline_attention(q, k, v, policy=baseline_policy).out
    outs: list[tuple[dict, Tensor]] = [({"method": "Baseline", "algorithm": "", "Bc": 0, "rescalings": 0.0}, baseline)]
    for algorithm in algorithms:
        for Bc in tiles:
            result = flash_attention(q, k, v, policy=flash_policy, algorithm=algorithm, tile=(rows, Bc))
            rescalings = result.counts["rescalings"] / (len(seeds) * rows)
            outs.append(({"method": "Flash", "algorithm": algorithm, "Bc": Bc, "rescalings": rescalings}, result.out))
    if kernel:
        real = torch_kernel(q, k, v, parse_format(format).torch_dtype)
        outs.append(({"method": "Flash", "algorithm": "torch", "Bc": 0, "rescalings": 0.0}, real))

    frames = []
    for reference, golden in goldens.items():
        labels = {"reference": reference, "output_rms": rms_per_seed(golden)}
        frames += [error_rows(difference(out, golden), seeds, **on, against="golden", **labels) for on, out in outs]
        if reference == references[0]:
            frames += [
                error_rows(difference(out, baseline), seeds, **on, against="Baseline", **labels) for on, out in outs[1:]
            ]
    return pd.concat(frames, ignore_index=True)
