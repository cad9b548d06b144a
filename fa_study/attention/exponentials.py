"""The exponential of attention, exp(S - m), as different kernels compute it.

Every way is a function of the single element: its bits depend neither on the element's place nor on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fa_study.rounding import Rounding

Exponential = str | Callable[[Tensor], Tensor]
EXPONENTIALS = ("exact", "exp2_fma", "fexp_u20")


def shifted_exp(
    scores: Tensor,
    maximum: Tensor,
    exp: Exponential = "exact",
    *,
    rounding: Rounding | None = None,
    generator: torch.Generator | None = None,
    scale: float = 1.0,
) -> Tensor:
    """``exp(scale * (scores - maximum))`` with every operation rounded.

    Parameters
    ----------
    scores, maximum : Tensor
        Float32 or float64, broadcast against each other: (..., L, S) and (..., L, 1), for example.
    exp : {"exact", "exp2_fma", "fexp_u20"} or callable
        "exact": the difference, then exp. "exp2_fma": 2 to the power of one fused multiply-add
        ``scores * c - round(maximum * c)`` with ``c = round(scale * log2(e))``, as the CUDA kernels do. "fexp_u20": see
        `fexp_u20`. A callable gets the (scaled) difference.
    rounding : Rounding, optional
        Applied after each operation; None: the dtype alone rounds.
    scale : float
        For kernels that keep the scores unscaled up to here.

    Returns
    -------
    Tensor
        In the dtype of `scores`. The gradient is that of the exact exponential at the computed value.

    Raises
    ------
    ValueError
        If `exp` is unknown; the message lists the known ones.
    """
    if not callable(exp) and exp not in EXPONENTIALS:
        raise ValueError(f"exp={exp!r} is unknown: use one of {', '.join(EXPONENTIALS)}, or a callable")
    if torch.is_grad_enabled() and (scores.requires_grad or maximum.requires_grad):
        return _ShiftedExp.apply(scores, maximum, exp, rounding, generator, scale)
    return _value(scores, maximum, exp, rounding, generator, scale)


class _ShiftedExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, maximum, exp, rounding, generator, scale):
        value = _value(scores, maximum, exp, rounding, generator, scale)
        ctx.save_for_backward(value)
        ctx.scale, ctx.shapes = scale, (scores.shape, maximum.shape)
        return value

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        slope = gradient * value * ctx.scale
        scores_shape, maximum_shape = ctx.shapes
        return slope.sum_to_size(scores_shape), -slope.sum_to_size(maximum_shape), None, None, None, None


def _value(scores, maximum, exp, rounding, generator, scale) -> Tensor:
    def rounded(x: Tensor) -> Tensor:
        return x if rounding is None else rounding(x, generator)

    if exp == "exp2_fma":
        return _exp2_fma(scores, maximum, rounded, scale)
    difference = rounded(scores - maximum)
    if scale != 1.0:
        difference = rounded(difference * scale)
    function = {"exact": exact_exp, "fexp_u20": fexp_u20}.get(exp, exp) if isinstance(exp, str) else exp
    return rounded(function(difference))


def _exp2_fma(scores: Tensor, maximum: Tensor, rounded: Callable[[Tensor], Tensor], scale: float) -> Tensor:
    c = rounded(torch.tensor(scale * math.log2(math.e), dtype=scores.dtype, device=scores.device))
    # add with alpha is one fused multiply-add.
    exponent = rounded(torch.add(-rounded(maximum * c), scores, alpha=c.item()))
    # In float64, because float32's exp2 gives other bits in the last few elements of an array than in the others.
    return rounded(torch.exp2(exponent.double()).to(scores.dtype))


# Below the first, exp in float32 is subnormal, for which the library's code is up to 200 times slower; below the second
# it rounds to 0, and so below the third.
_SUBNORMAL, _NEARLY_ZERO, _ZERO = -87.0, -104.0, -105.0


def exact_exp(x: Tensor) -> Tensor:
    """exp(x) within one unit in the last place. Fast also where float32 results are subnormal or zero.

    This is `torch.exp`, but for subnormal float32 results on a CPU, which are those of float64 rounded.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.numel() == 0 or not x.amin() < _SUBNORMAL:
        return torch.exp(x)
    # Comparisons are slow here, hence the product with a ramp that is 0 for masked keys and 1 from -104 upwards.
    value = torch.exp(x.clamp(min=_SUBNORMAL)).mul_((x - _ZERO).clamp_(0.0, 1.0))
    if torch.threshold(x, _ZERO, 0.0).amin() < _SUBNORMAL:
        in_float64 = torch.exp(x.double().clamp_(min=_NEARLY_ZERO)).float()
        value = torch.where(x < _SUBNORMAL, in_float64, value)
    return value


# exp(x) = 2^s with s = x log2(e). The cubic is 1 + f - 2^f for the fraction f of s, nearly, so that s - cubic has the
# integer and the fraction field of a float32. After Malossi, Ineichen, Bekas and Curioni, "Fast exponential computation
# on SIMD architectures"; the coefficients are those of PyTorch's vector code.
_CUBIC = (0.00010703434948458272, 0.30354260500649682, -0.22433836478672356, -0.079204240219773236)
_LOG2_E = 1.44269502162933349609375  # the float32 nearest to log2(e)
_LOWEST = -87.3365478515625  # zero below
_HIGHEST = 88.72283935546875  # infinity above


# Every x below _LOWEST leads to fewer bits than this, and no other x does.
_LOWEST_BITS = 8387600.0


def fexp_u20(x: Tensor) -> Tensor:
    """PyTorch's fast exponential of the CPU flash kernel for 16-bit inputs, bit for bit (AVX2 and AVX-512 builds).

    Relative error up to 1.2e-4; 0 below -87.34, inf above 88.72. NaN stays NaN, which PyTorch turns into -0. Computed
    in float32 whatever the dtype of `x`, and returned in that dtype. Without gradient: `shifted_exp` has one.
    """
    flat = x.detach().float().reshape(-1)
    out = torch.empty_like(flat)
    size = FEXP_CHUNK * torch.get_num_threads() if x.device.type == "cpu" else max(flat.numel(), 1)
    scratch = torch.empty_like(flat[:size])
    for start in range(0, flat.numel(), size):
        part = flat[start : start + size]
        _fexp_u20_into(out[start : start + size], part, scratch[: len(part)])
    return out.view(x.shape).to(x.dtype)


# Elements worked on at a time and thread: the buffers stay in a core's second-level cache.
FEXP_CHUNK = 1 << 16


def _fexp_u20_into(f: Tensor, x: Tensor, cubic: Tensor) -> None:
    s = x.clamp(_LOWEST - 1.0, _HIGHEST).mul_(_LOG2_E)
    torch.floor(s, out=f)
    torch.sub(s, f, out=f)
    c0, c1, c2, _ = (torch.tensor(c, device=x.device) for c in _CUBIC)
    # add with alpha and addcmul are fused multiply-adds, on the CPU and on CUDA.
    torch.add(c2, f, alpha=_CUBIC[3], out=cubic)
    torch.addcmul(c1, f, cubic, out=cubic)
    torch.addcmul(c0, f, cubic, out=cubic)
    torch.add(torch.tensor(127.0 * 2**23, device=x.device), s.sub_(cubic), alpha=2.0**23, out=s)
    f.view(torch.int32).copy_(torch.threshold_(s, _LOWEST_BITS, 0.0))
    if x.amax() <= _HIGHEST:
        return
    # Adds 0 up to _HIGHEST, infinity above, and NaN to NaN.
    f.add_(torch.threshold_(cubic.copy_(x), _HIGHEST, 0.0), alpha=torch.finfo(torch.float32).max)
