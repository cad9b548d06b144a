"""Matrix products whose inner sums are kept in a chosen format, as tensor cores keep them.

Shapes: a (..., M, K), b (..., K, N), product (..., M, N); leading dimensions broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
