"""Rounding a million float32 values on one thread: native formats against two casts, general ones against packages."""

from __future__ import annotations

from functools import partial

import gfloat
import pychop
import torch
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2
from harness import ratio, show

from fa_study.attention.exponentials import exact_exp, fexp_u20
from fa_study.attention.tile_products import product
from fa_study.formats import round_to
from fa_study.rounding import Accumulation

TF32_GFLOAT = gfloat.FormatInfo(
    "tf32",
    19,
    11,
    bias=127,
    is_signed=True,
    domain=gfloat.Domain.Extended,
    has_nz=True,
    num_high_nans=1023,
    has_subnormals=True,
    is_twos_complement=False,
)


def measure() -> list[dict]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    array = x.numpy()
    rows = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        ours = partial(round_to, x, name)
        rows.append(
            ratio(f"round to {name} / two casts", ours, lambda d=dtype: x.to(d).float(), bar="at most 2", rounds=15)
        )
    for name, info, bits in (
        ("fp8_e5m2", format_info_ocp_e5m2, (5, 2)),
        ("tf32", TF32_GFLOAT, (8, 10)),
        ("fp8_e4m3", format_info_ocp_e4m3, (4, 3)),
    ):
        ours = partial(round_to, x, name)
        rows.append(
            ratio(
                f"round to {name} / gfloat", ours, partial(gfloat.round_ndarray, info, array), bar="at most 1/5 = 0.2"
            )
        )
        rows.append(ratio(f"round to {name} / pychop", ours, partial(pychop.Chop(*bits), x), bar="at most 1/3 = 0.333"))
    wide = x.double()
    rows.append(
        ratio(
            "round float64 to bf16 / gfloat",
            partial(round_to, wide, "bf16"),
            partial(gfloat.round_ndarray, gfloat.formats.format_info_bfloat16, wide.numpy()),
            bar="at most 1/5 = 0.2",
        )
    )
    negative = -x.abs()
    rows.append(ratio("fexp_u20 / torch.exp", partial(fexp_u20, negative), partial(torch.exp, negative), bar="none"))
    masked = negative.masked_fill(x > 0, -torch.inf)
    rows.append(
        ratio("masked exp / torch.exp", partial(exact_exp, masked), partial(torch.exp, masked), bar="at most 1")
    )
    a, b = (torch.randn(4, *shape).bfloat16().float() for shape in ((256, 64), (64, 512)))
    narrow = partial(product, a, b, Accumulation(), narrow=True)
    rows.append(ratio("BF16 product / FP32 product", narrow, partial(torch.bmm, a, b), bar="at most 1"))
    torch.set_num_threads(threads)
    return rows


if __name__ == "__main__":
    show(measure())
