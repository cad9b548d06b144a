"""Floating-point formats, and rounding a tensor to a format that may be narrower than its dtype (the carrier).

How: let 2^e be the power of two at or below |x|, but no less than the format's smallest normal number. Then x / 2^e has
the binary point where the format's fraction begins, so that rounding x / 2^e to a multiple of 2^-M is one call, and
every other step is exact. Nothing on the way is subnormal unless the result is, which keeps zeros and tails fast.
To nearest even, where nothing on the way can overflow, a sum with 1.5 * 2^e * 2^(p - M) rounds as well, p being the
fraction bits of the carrier: the sum's last bit is worth 2^(e - M). It is taken off again; this takes half the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_study.float_format import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FP64, TF32, FloatFormat, parse_format

__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "FP64",
    "ROUNDINGS",
    "TF32",
    "FloatFormat",
    "parse_format",
    "round_to",
]

ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")

# Elements worked on at a time and thread: three float32 buffers of this size stay in a core's second-level cache.
CHUNK = 1 << 16

_FORMAT_OF = {torch.float64: FP64, torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


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
        return StraightThrough.apply(_round, x, fmt, rounding, generator)
    return _round(x, fmt, rounding, generator)


class StraightThrough(torch.autograd.Function):
    """``function(x, ...)`` with the gradient of x itself: rounding is flat almost everywhere."""

    @staticmethod
    def forward(ctx, function, x, *rest):
        ctx.others = (None,) * len(rest)
        result = function(x, *rest)
        return x.view_as(x) if result is x else result

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient, *ctx.others


def _round(x: Tensor, fmt: FloatFormat, rounding: str, generator: torch.Generator | None) -> Tensor:
    if _holds(fmt, x.dtype):
        return x
    # Native casts from float64 to 16 bits go through float32 and would round twice.
    native = rounding == "nearest_even" and fmt.torch_dtype
    if native and (x.dtype != torch.float64 or fmt == FP32):
        return x.to(native).to(x.dtype)
    _refuse_unholdable_max(fmt, x.dtype, rounding)
    fits_float32 = fmt.exponent_bits <= 8 and fmt.max_exponent <= 127
    carrier = torch.float32 if fits_float32 and x.dtype != torch.float64 else torch.float64
    return _round_in_chunks(x.to(carrier), fmt, rounding, generator).to(x.dtype)


def _holds(fmt: FloatFormat, dtype: torch.dtype) -> bool:
    """Whether every value of the dtype is a value of the format."""
    carrier = _FORMAT_OF.get(dtype)
    return (
        carrier is not None
        and fmt.overflow == "inf"
        and fmt.exponent_bits >= carrier.exponent_bits
        and fmt.mantissa_bits >= carrier.mantissa_bits
    )


def _refuse_unholdable_max(fmt: FloatFormat, dtype: torch.dtype, rounding: str) -> None:
    """Saturating to a maximum that the carrier lacks would silently round it again, such as 65504 in bfloat16."""
    gives_max = fmt.overflow == "saturate" or rounding == "toward_zero"
    reachable = fmt.max < torch.finfo(dtype).max
    if gives_max and reachable and torch.tensor(fmt.max, dtype=dtype).item() != fmt.max:
        raise ValueError(
            f"a {dtype} tensor cannot hold {fmt.max:g}, the largest value of {fmt}: convert it to a wider dtype first"
        )


def _round_in_chunks(x: Tensor, fmt: FloatFormat, rounding: str, generator: torch.Generator | None) -> Tensor:
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    # Drawn at once, so that the bits do not depend on the chunks.
    u = None
    if rounding == "stochastic":
        u = torch.rand(flat.shape, generator=generator, dtype=flat.dtype, device=flat.device)
    size = CHUNK * torch.get_num_threads() if flat.device.type == "cpu" else max(flat.numel(), 1)
    scratch = torch.empty_like(flat[:size])
    for start in range(0, flat.numel(), size):
        part = slice(start, start + size)
        power = _clamped_power_of_two(flat[part], fmt, scratch[: flat.numel() - start])
        _round_into(out[part], flat[part], power, fmt, rounding, None if u is None else u[part])
    return out.view(x.shape)


def _round_into(t: Tensor, x: Tensor, power: Tensor, fmt: FloatFormat, rounding: str, u: Tensor | None) -> None:
    if rounding == "nearest_even" and _sum_rounds(x, fmt):
        factor = 1.5 * 2.0 ** (_FORMAT_OF[x.dtype].mantissa_bits - fmt.mantissa_bits)
        torch.add(x, power, alpha=factor, out=t).sub_(power, alpha=factor).copysign_(x)
        _overflow(t, x, fmt, rounding)
        return
    torch.div(x, power, out=t).mul_(2.0**fmt.mantissa_bits)
    if rounding == "nearest_even":
        t.round_()
    elif rounding == "toward_zero":
        t.trunc_()
    else:
        low = t.floor()
        # One step up where the fraction t - low exceeds u; an infinity has no fraction.
        t.sub_(low).sub_(u).ceil_()
        t.nan_to_num_(0.0).add_(low).copysign_(x)
    t.mul_(2.0**-fmt.mantissa_bits).mul_(power)
    _overflow(t, x, fmt, rounding)


def _sum_rounds(x: Tensor, fmt: FloatFormat) -> bool:
    """Whether x + 1.5 * 2^e * 2^(p - M) cannot overflow, and leaves room for a carry."""
    carrier = _FORMAT_OF[x.dtype]
    spare = carrier.mantissa_bits - fmt.mantissa_bits
    if spare < 7:
        return False
    if fmt.max_exponent + spare < carrier.max_exponent:
        return True
    limit = 2.0 ** (carrier.max_exponent - spare - 1)
    return -limit < float(x.amin()) and float(x.amax()) < limit


def _clamped_power_of_two(x: Tensor, fmt: FloatFormat, power: Tensor) -> Tensor:
    """The largest power of two that is <= |x|, within the exponents of the format's normal numbers."""
    integer, exponent_field = (
        (torch.int32, 0x7F800000) if x.dtype == torch.float32 else (torch.int64, 0x7FF0000000000000)
    )
    torch.bitwise_and(x.view(integer), exponent_field, out=power.view(integer))
    return power.clamp_(2.0**fmt.min_exponent, 2.0**fmt.max_exponent)


def _overflow(t: Tensor, x: Tensor, fmt: FloatFormat, rounding: str) -> None:
    """Replace, in place, what rounding x left beyond the format's largest value."""
    if fmt.overflow == "saturate":
        t.clamp_(-fmt.max, fmt.max)
    elif rounding == "toward_zero":
        t.clamp_(-fmt.max, fmt.max)
        infinity = x if fmt.overflow == "inf" else x.new_tensor(float("nan"))
        torch.where(x.isinf(), infinity, t, out=t)
    elif fmt.overflow == "nan":
        t.masked_fill_(t.abs() > fmt.max, float("nan"))
    else:
        # Up to where the carrier overflows just when the format does, and back: exact for all that stays finite.
        headroom = 2.0 ** (_FORMAT_OF[t.dtype].max_exponent - fmt.max_exponent)
        if headroom > 1.0:
            t.mul_(headroom).mul_(1.0 / headroom)
