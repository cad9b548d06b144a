"""Matrix products of tiles whose bits do not depend on how a matrix was cut, padded, stored or shared among threads.

A plain product chooses its order of summation by its shape: a product of one column is a dot product, one over many
terms is cut into pieces by the number of rows and threads, and the last columns may be added up in another way than the
others. Therefore every operand here is contiguous, every dimension is padded with zeros to 16 rows, a `column_step` and
a `tile_width` of keys, and sums of more than a `slab` of terms are cut into slabs here, in a fixed order. Libraries
choose by the processor: what this one needs is tried out once. The tests of the bit rules hold these choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa_study.attention.products import matmul
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
    return 512 if narrow else _terms_of_one_order(dtype, 128 if dtype == torch.float64 else 256)


def bf16_products() -> bool:
    """Whether PyTorch has fast BF16 products on this processor: oneDNN's need AVX-512, and without them one is a plain
    loop, thirty times slower than FP32 products of the same values, in an order of its own."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def _terms_of_one_order(dtype: torch.dtype, most: int) -> int:
    """The largest multiple of 64, at most `most`, where zeros behind the terms of a product change no bit of it."""
    a, b = (_irregular(64, most, dtype), _irregular(most, 64, dtype))
    with torch.no_grad(), float32_products("ieee"):
        for terms in range(most, 64, -64):
            shorter = (16, 32, *range(64, terms, 64))  # the tile widths
            whole = [torch.bmm(padded(a[..., :n], 64, terms), padded(b[:, :n], terms, 64)) for n in shorter]
            alone = [torch.bmm(a[..., :n].contiguous(), b[:, :n].contiguous()) for n in shorter]
            if all(map(torch.equal, whole, alone)):
                return terms
    return 64


@cache
def column_step(dtype: torch.dtype) -> int:
    """What the number of a product's columns is padded to a multiple of, so that all are added up alike."""
    with torch.no_grad(), float32_products("ieee"):
        alike = torch.bmm(_irregular(64, 64, dtype), _irregular(64, 1, dtype).expand(1, 64, 64).contiguous())
    return 16 if (alike == alike[..., :1]).all() else 24


def _irregular(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """(1, rows, columns) numbers whose sums are all rounded."""
    return torch.arange(1, rows * columns + 1, dtype=torch.float64).sin().to(dtype).view(1, rows, columns)


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
    spare = 0 if narrow else -b.shape[-1] % column_step(a.dtype)
    if spare:
        total = product(a, pad(b, (0, spare)), accumulation)[..., :-spare]
        return total.contiguous() if out is None else out.copy_(total)
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
