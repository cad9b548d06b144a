"""Kernels that need CUDA and packages of their own: flash-attn 2, 3 and 4, xformers.

All of these keep heads behind lengths: (B, L, H, D). Shape letters: B batch, H heads, L queries, D head size.
"""

from __future__ import annotations

from torch import Tensor


def _heads_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _out(result: object) -> Tensor:
    out = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


def _window(window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    left, right = window or (None, None)
    return (-1 if left is None else left, -1 if right is None else right)


def flash_attn_2(q, k, v, *, causal: bool = False, scale=None, softcap=None, window=None) -> Tensor:
    """FlashAttention 2 of its authors."""
    from flash_attn import flash_attn_func

    return _out(
        flash_attn_func(
            *_heads_last(q, k, v),
            causal=causal,
            softmax_scale=scale,
            softcap=softcap or 0.0,
            window_size=_window(window),
        )
    )


def flash_attn_3(q, k, v, *, causal: bool = False, scale=None, softcap=None, window=None) -> Tensor:
    """FlashAttention 3 of its authors (Hopper)."""
    from flash_attn_interface import flash_attn_func

    return _out(
        flash_attn_func(
            *_heads_last(q, k, v),
            causal=causal,
            softmax_scale=scale,
            softcap=softcap or 0.0,
            window_size=_window(window),
        )
    )


def flash_attn_4(q, k, v, *, causal: bool = False, scale=None, softcap=None, window=None) -> Tensor:
    """FlashAttention 4 of its authors (CuTe DSL)."""
    from flash_attn.cute import flash_attn_func

    left, right = window or (None, None)
    return _out(
        flash_attn_func(
            *_heads_last(q, k, v),
            causal=causal,
            softmax_scale=scale,
            softcap=softcap or 0.0,
            window_size=(left, right),
        )
    )


def xformers(q, k, v, *, causal: bool = False, bias=None, scale=None) -> Tensor:
    """xformers' memory-efficient attention, whichever of its kernels it picks."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    extra = LowerTriangularMask() if causal else bias
    return _out(memory_efficient_attention(*_heads_last(q, k, v), attn_bias=extra, scale=scale))
