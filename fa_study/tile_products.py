"""Matrix products of tiles whose bits do not depend on how a matrix was cut, padded, stored or shared among threads.

A plain product chooses its order of summation by its shape: a product of one column is a dot product, one over many
terms is cut into pieces by the number of rows and threads. Therefore every operand here is contiguous, every dimension
is padded with zeros to 16 rows, 16 columns and a `tile_width` of keys, and sums of more than a `slab` of terms are cut
into slabs here, in a fixed order. The tests of the bit rules hold these choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa_study.products import matmul
from fa_study.rounding import Accumulation


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def tile_width(keys: int, narrow: bool = False) -> int:
    """Padded number of keys of a tile: 16, 32, or a multiple of 64.

    At least 32 for narrow products, because one of 16 x 16 x 16 does not reach the matrix units.
    """
    return 16 if keys <= 16 and not narrow else 32 if keys <= 32 else round_up(keys, 64)


def slab(dtype: torch.dtype, narrow: bool = False) -> int:
    """Number of terms up to which a native product adds in an order that does not depend on the other sizes."""
    return 512 if narrow else 128 if dtype == torch.float64 else 256


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """PyTorch's own setting for float32 products on the CPU, whatever the user chose: "ieee", or "bf16" for operands
    that are BF16 values anyway, whose FP32 sums the matrix units then compute, several times faster."""
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    if before == precision:
        yield
        return
    setting.fp32_precision = precision
    try:
        yield
    finally:
        setting.fp32_precision = before


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """x (..., r, c) with zeros added up to `rows` and `columns`; contiguous."""
    add_rows, add_columns = rows - x.shape[-2], columns - x.shape[-1]
    if add_rows or add_columns:
        x = pad(x, (0, add_columns, 0, add_rows))
    return x.contiguous()


def product(
    a: Tensor,
    b: Tensor,
    accumulation: Accumulation,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
    narrow: bool = False,
) -> Tensor:
    """a (N, M, K) times b (N, K, P), sums kept as `accumulation` says; `out` is a buffer that may be used.

    narrow: all values are BF16 values, and neither they nor their products are subnormal (matrix units flush those).
    """
    if a.dtype != torch.bfloat16 and not accumulation.is_native(a.dtype):
        return matmul(a, b, accumulation, generator)
    narrow = narrow and a.dtype == torch.float32
    terms, step = a.shape[-1], slab(a.dtype, narrow)
    with float32_products("bf16" if narrow else "ieee"):
        if terms <= step:
            return torch.bmm(a, b, out=out)
        total = torch.bmm(a[..., :step], b[:, :step], out=out)
        for start in range(step, terms, step):
            total += torch.bmm(a[..., start : start + step], b[:, start : start + step])
    return total


def masked_product(
    a: Tensor, b: Tensor, dead: Tensor | None, accumulation: Accumulation, generator: torch.Generator | None = None
) -> Tensor:
    """As `product`, but a term whose a-element is masked (dead, as a) is absent even where b holds NaN or infinity.

    Slow, and only called where b is not finite: 0 * NaN would otherwise spread from a masked key to every row.
    """
    if dead is None:
        return product(a, b, accumulation, generator)
    live = ~dead
    finite = b.isfinite()
    total = product(a, torch.where(finite, b, torch.zeros_like(b)), accumulation, generator)

    def meets(x: Tensor, y: Tensor) -> Tensor:
        return torch.bmm((x & live).to(a.dtype), y.to(a.dtype)) > 0

    up = meets(a > 0, b == torch.inf) | meets(a < 0, b == -torch.inf)
    down = meets(a > 0, b == -torch.inf) | meets(a < 0, b == torch.inf)
    invalid = meets(live, b.isnan()) | meets(a == 0, b.isinf()) | (up & down)
    total = total.masked_fill(up, torch.inf).masked_fill(down, -torch.inf)
    return total.masked_fill(invalid | total.isnan(), torch.nan)
