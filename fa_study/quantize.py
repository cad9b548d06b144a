"""Quantisation with block scales (FP8, INT8), and the Hadamard transform that spreads outliers before it.

Shapes: x (..., R, C); a block is a rectangle of rows and columns that shares one scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_study.formats import FloatFormat, StraightThrough, parse_format, round_to

INT8_MAX = 127.0


def quantize(
    x: Tensor,
    fmt: str | FloatFormat,
    *,
    block: int | tuple[int | None, int | None] | None = None,
    scale: str | float = "max",
) -> Tensor:
    """The values that `x` has after quantisation: ``scale * round(x / scale)``, one scale per block.

    Parameters
    ----------
    x : Tensor
        Any shape.
    fmt : str, FloatFormat or "int8"
        Format of x / scale. "int8": integers from -127 to 127, ties to even.
    block : int or (rows, columns), optional
        None: one scale for the whole tensor. An int: that many neighbours in the last dimension, as in microscaling
        formats. A pair: a rectangle of the last two dimensions, None meaning all of that dimension; (128, None) is 128
        tokens, as in SageAttention and FP8 FlashAttention 3. Blocks at the end may be smaller.
    scale : {"max", "power_of_two"} or float
        "max": the largest finite |x| of the block over the largest value of `fmt`. "power_of_two": the smallest power
        of two that is not below that. A number: itself, for every block; what exceeds the range then overflows.

    Returns
    -------
    Tensor
        Shape of `x`, in float64 if `x` is, else float32: 16 bits cannot hold scale times value. NaN stays NaN, an
        infinity overflows as `fmt` says. Gradients pass straight through.

    Raises
    ------
    ValueError
        If `x` is no floating tensor, or the format, block or scale makes no sense.
    """
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        raise ValueError(f"quantize needs a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x)}")
    target = None if fmt == "int8" else parse_format(fmt)
    rows, columns = _block_shape(x, block)
    wide = x if x.dtype == torch.float64 else x.float()
    if x.numel() == 0:
        return wide
    if torch.is_grad_enabled() and x.requires_grad:
        return StraightThrough.apply(_quantized, wide, target, rows, columns, scale)
    return _quantized(wide, target, rows, columns, scale)


def _block_shape(x: Tensor, block: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """Rows and columns of a block; (None, None) only for the whole tensor."""
    if block is None:
        return None, None
    pair = (1, block) if isinstance(block, int) else block
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    if not is_pair or any(n is not None and (type(n) is not int or n < 1) for n in pair):
        raise ValueError(
            f"block={block!r}: use None, a positive int, or a pair (rows, columns) of positive ints or None"
        )
    if x.dim() < (1 if isinstance(block, int) else 2):
        raise ValueError(f"block={block!r} needs more dimensions than x of shape {tuple(x.shape)} has")
    height = x.shape[-2] if x.dim() > 1 else 1
    return pair[0] or max(height, 1), pair[1] or max(x.shape[-1], 1)


def _quantized(x: Tensor, target: FloatFormat | None, rows: int | None, columns: int | None, scale: str | float):
    largest = INT8_MAX if target is None else target.max
    if rows is None:
        return _round_scaled(x, _scale(x, largest, scale, tuple(range(x.dim()))), target)
    matrix = x.reshape(-1, *x.shape[-2:]) if x.dim() > 1 else x.reshape(1, 1, -1)
    height, width = matrix.shape[-2:]
    # Zeros change no maximum, so ragged blocks are padded.
    padded = torch.nn.functional.pad(matrix, (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    result = _round_scaled(blocks, _scale(blocks, largest, scale, (-3, -1)), target)
    return result.view(padded.shape)[..., :height, :width].reshape(x.shape)


def _scale(x: Tensor, largest: float, scale: str | float, dims: tuple[int, ...]) -> Tensor:
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale!r}: use a positive finite number, 'max' or 'power_of_two'")
        given = x.new_tensor(scale)
        if not 0 < given < math.inf:
            raise ValueError(
                f"scale={scale!r} is {given.item()} in {x.dtype}: use a positive number in its range, or float64"
            )
        return given
    if scale not in ("max", "power_of_two"):
        raise ValueError(f"scale={scale!r} is unknown: use 'max', 'power_of_two' or a positive number")
    peak = x.abs().nan_to_num(nan=0.0, posinf=0.0).amax(dims, keepdim=True)
    ratio = peak / largest
    if scale == "power_of_two":
        # ratio = m 2^e with 0.5 <= m < 1, where m = 0.5 is a power of two already.
        mantissa, exponent = torch.frexp(ratio)
        ratio = torch.ldexp(torch.ones_like(ratio), exponent - (mantissa == 0.5).to(exponent.dtype))
    # A block of zeros, or of values so small that the ratio is subnormal, keeps a scale that can be divided by.
    return ratio.clamp_(min=torch.finfo(x.dtype).tiny)


def _round_scaled(x: Tensor, scale: Tensor, target: FloatFormat | None) -> Tensor:
    scaled = x / scale
    if target is None:
        return scaled.round_().clamp_(-INT8_MAX, INT8_MAX).mul_(scale)
    return round_to(scaled, target).mul(scale)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension: ``x H`` with H symmetric and H H = 1.

    It leaves the products of queries and keys as they are, but spreads an outlier over the head dimension, so that a
    shared scale fits all values (QuIP, FlashAttention 3). Multiply by random signs first to spread any fixed pattern.

    Parameters
    ----------
    x : Tensor
        (..., D) with D a power of two. 16-bit tensors are transformed in float32 and rounded once.

    Raises
    ------
    ValueError
        If D is no power of two or `x` is no floating tensor.
    """
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        raise ValueError(f"hadamard needs a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x)}")
    size = x.shape[-1] if x.dim() else 0
    if size < 1 or size & (size - 1):
        raise ValueError(f"hadamard needs a last dimension that is a power of two, got shape {tuple(x.shape)}: pad it")
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    half = 1
    while half < size:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return (y * size**-0.5).to(x.dtype)
