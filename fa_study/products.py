"""Matrix products whose inner sums are kept in a chosen format, as tensor cores keep them.

Shapes: a (..., M, K), b (..., K, N), product (..., M, N); leading dimensions broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fa_study.rounding import Accumulation


def matmul(a: Tensor, b: Tensor, accumulation: Accumulation, generator: torch.Generator | None = None) -> Tensor:
    """The product a @ b with its sums over K kept as `accumulation` says.

    An FP32 or FP64 sum with no rounding in between (`every` and `promote` None) is one native product. Otherwise
    ``sum = round(sum + a_k b_k + ... + a_{k+every-1} b_{k+every-1})`` with the bracket in float64, where products of
    operands of up to 26 bits are exact; after `promote` terms the sum is added to an FP32 total and starts again at 0.

    Parameters
    ----------
    a, b : Tensor
        (..., M, K) and (..., K, N). 16-bit operands count as float32.
    accumulation : Accumulation
    generator : torch.Generator, optional
        For stochastic rounding of the sums.

    Returns
    -------
    Tensor
        (..., M, N) in float64 if an operand is, else float32. Gradients are those of the exact product.
    """
    carrier = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(carrier), b.to(carrier)
    if accumulation.is_native(carrier):
        return a @ b
    return _EmulatedProduct.apply(a, b, accumulation, generator)


class _EmulatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, accumulation, generator):
        ctx.save_for_backward(a, b)
        return _emulated(a.double(), b.double(), accumulation, generator).to(a.dtype)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        grad_a = (gradient @ b.mT).sum_to_size(a.shape) if ctx.needs_input_grad[0] else None
        grad_b = (a.mT @ gradient).sum_to_size(b.shape) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None


def _emulated(a: Tensor, b: Tensor, accumulation: Accumulation, generator: torch.Generator | None) -> Tensor:
    terms = a.shape[-1]
    promote = accumulation.promote or max(terms, 1)
    every = accumulation.every or max(terms, 1)
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = a.new_zeros(shape)
    for start in range(0, terms, promote):
        stop = min(start + promote, terms)
        partial = a.new_zeros(shape)
        for k in range(start, stop, every):
            end = min(k + every, stop)
            inner = a[..., k:end] @ b[..., k:end, :]
            partial = accumulation.format(partial.add_(inner), generator)
        if accumulation.promote is None:
            return partial
        total = (total + partial).float().double()
    return total


# PyTorch gives products of this many terms in all, or fewer, to other code, whose order differs.
_PLAIN_UP_TO = 16**3


def bf16_bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b for stacks of float32 matrices that hold BF16 values, on the processor's BF16 units, with an FP32 result.

    This is the product inside PyTorch's CPU kernels for BF16. On a processor with AMX, every 32 terms are added as two
    FP32 chains of fused multiply-adds, the even terms and the odd ones, and the sum of both is added to the result. The
    order depends on nothing else, so the bits of an element are the same for every shape, padding, stride and number of
    threads; and it is two to three times as fast as a product in FP32. Subnormal BF16 operands count as zero. Without
    such units, and on other devices, it is the plain product.

    Parameters
    ----------
    a, b : Tensor
        (B, M, K) and (B, K, N), float32. What is not a BF16 value is rounded to one.
    out : Tensor, optional
        Where to put the result.
    """
    (rows, terms), columns = a.shape[-2:], b.shape[-1]
    if rows * terms * columns <= _PLAIN_UP_TO:
        more = (max(8 - terms, 0), max(32 - rows, 0), max(32 - columns, 0))
        product = bf16_bmm(pad(a, (0, more[0], 0, more[1])), pad(b, (0, more[2], 0, more[0])))
        product = product[..., :rows, :columns]
        return product if out is None else out.copy_(product)
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        return torch.bmm(a, b, out=out)
    finally:
        settings.fp32_precision = before
