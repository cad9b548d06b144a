"""Rounding a tensor to a floating-point format that may be narrower than its dtype (the carrier).

How: with q the distance between neighbours of the format around x, a power of two, x / q is exact, and rounding it to an
integer and multiplying by q is exact too. So one line per rounding mode is enough, subnormals included: q never falls
below the smallest subnormal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_study.formats import FP32, FloatFormat, parse_format

ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")

# dtype -> integer view, mask of the exponent field, exponent bits, fraction bits
_CARRIERS = {
    torch.float32: (torch.int32, 0x7F800000, 8, 23),
    torch.float64: (torch.int64, 0x7FF0000000000000, 11, 52),
}


def round_to(
    x: Tensor,
    fmt: str | FloatFormat,
    *,
    rounding: str = "nearest_even",
    generator: torch.Generator | None = None,
) -> Tensor:
    """The values of `x` rounded to a format, in the dtype and on the device of `x`.

    Parameters
    ----------
    x : Tensor
        Any floating dtype and shape. Returned as it is where the format holds all its values.
    fmt : str or FloatFormat
        See `parse_format`.
    rounding : {"nearest_even", "toward_zero", "stochastic"}
        Toward zero, a finite value beyond the format's range becomes the largest finite value. Stochastic rounding goes
        to the upper neighbour with the probability (x - lower) / (upper - lower).
    generator : torch.Generator, optional
        Source of the random numbers of stochastic rounding, on the device of `x`.

    Returns
    -------
    Tensor
        Gradients pass through unchanged (straight-through estimator).

    Raises
    ------
    ValueError
        If `x` is no floating tensor, the format or mode is unknown, or the dtype of `x` cannot hold the largest value
        of the format where that value may be the result.
    """
    fmt = parse_format(fmt)
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is unknown: use one of {', '.join(ROUNDINGS)}")
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"round_to needs a floating-point tensor, got {given}")
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, fmt, rounding, generator)
    return _round(x, fmt, rounding, generator)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fmt, rounding, generator):
        rounded = _round(x, fmt, rounding, generator)
        return x.view_as(x) if rounded is x else rounded

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None, None


def _round(x: Tensor, fmt: FloatFormat, rounding: str, generator: torch.Generator | None) -> Tensor:
    if _holds(fmt, x.dtype):
        return x
    # Native casts from float64 to 16 bits go through float32 and would round twice.
    native = rounding == "nearest_even" and fmt.torch_dtype
    if native and (x.dtype == torch.float32 or fmt == FP32):
        return x.to(native).to(x.dtype)
    _refuse_unholdable_max(fmt, x.dtype, rounding)
    carrier = torch.float64 if x.dtype == torch.float64 or fmt.exponent_bits > 8 else torch.float32
    return _round_carrier(x.to(carrier), fmt, rounding, generator).to(x.dtype)


def _holds(fmt: FloatFormat, dtype: torch.dtype) -> bool:
    """Whether every value of the dtype is a value of the format."""
    if fmt.overflow != "inf" or dtype not in _FIELDS:
        return False
    exponent_bits, mantissa_bits = _FIELDS[dtype]
    if fmt.mantissa_bits < mantissa_bits:
        return False
    # A wider fraction alone is not enough: the format's subnormals begin earlier where its exponent is narrower.
    return fmt.exponent_bits >= exponent_bits


_FIELDS = {torch.float64: (11, 52), torch.float32: (8, 23), torch.bfloat16: (8, 7), torch.float16: (5, 10)}


def _refuse_unholdable_max(fmt: FloatFormat, dtype: torch.dtype, rounding: str) -> None:
    gives_max = fmt.overflow == "saturate" or rounding == "toward_zero"
    reachable = fmt.max < torch.finfo(dtype).max
    if gives_max and reachable and torch.tensor(fmt.max, dtype=dtype).item() != fmt.max:
        raise ValueError(
            f"a {dtype} tensor cannot hold {fmt.max:g}, the largest value of {fmt}: convert it to a wider dtype first"
        )


def _round_carrier(x: Tensor, fmt: FloatFormat, rounding: str, generator: torch.Generator | None) -> Tensor:
    integer, exponent_mask, exponent_bits, _ = _CARRIERS[x.dtype]
    q = (x.view(integer) & exponent_mask).view(x.dtype)  # 2^exponent; 0 for subnormals of the carrier
    q.clamp_(2.0**fmt.min_exponent, 2.0**fmt.max_exponent).mul_(2.0**-fmt.mantissa_bits)
    t = x / q
    if rounding == "nearest_even":
        t.round_()
    elif rounding == "toward_zero":
        t.trunc_()
    else:
        low = t.floor()
        u = torch.rand(t.shape, generator=generator, dtype=t.dtype, device=t.device)
        t = torch.copysign(low + (u < t - low), x)
    r = t.mul_(q)
    if rounding == "toward_zero":
        return torch.where(x.isinf(), _overflow(x, fmt), r.clamp_(-fmt.max, fmt.max))
    return _overflow(r, fmt)


def _overflow(r: Tensor, fmt: FloatFormat) -> Tensor:
    if fmt.overflow == "saturate":
        return r.clamp(-fmt.max, fmt.max)
    beyond = r.abs() > fmt.max
    if fmt.overflow == "nan":
        return r.masked_fill(beyond, float("nan"))
    return torch.where(beyond, torch.copysign(torch.full_like(r, float("inf")), r), r)
