"""Kernels that need CUDA and packages of their own: flash-attn 2, 3 and 4, xformers.

All of these keep heads behind lengths: (B, L, H, D). Shape letters: B batch, H heads, L queries, D head size.
"""

from __future__ import annotations

import inspect

from torch import Tensor

from fa_study.kernels.pytorch import as_bias


def _heads_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _heads_first(result: Tensor | tuple) -> Tensor | tuple[Tensor, Tensor]:
    """The output (B, H, L, D), with the log-sum-exp (B, H, L) if there is one."""
    if isinstance(result, Tensor):
        return result.transpose(1, 2)
    out, lse, *_ = result
    return out.transpose(1, 2) if lse is None else (out.transpose(1, 2), lse)


def _asking(function, keyword: str) -> dict[str, bool]:
    """The keyword that asks for the log-sum-exp; versions that have it not return it anyhow, or never."""
    return {keyword: True} if keyword in inspect.signature(function).parameters else {}


def _window(window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    left, right = window or (None, None)
    return (-1 if left is None else left, -1 if right is None else right)


def flash_attn_2(q, k, v, *, causal: bool = False, scale=None, softcap=None, window=None):
    """FlashAttention 2 of its authors: output and log-sum-exp."""
    from flash_attn import flash_attn_func

    return _call(flash_attn_func, "return_attn_probs", q, k, v, causal, scale, softcap, _window(window))


def flash_attn_3(q, k, v, *, causal: bool = False, scale=None, softcap=None, window=None):
    """FlashAttention 3 of its authors (Hopper): output and log-sum-exp."""
    from flash_attn_interface import flash_attn_func

    return _call(flash_attn_func, "return_attn_probs", q, k, v, causal, scale, softcap, _window(window))


def flash_attn_4(q, k, v, *, causal: bool = False, scale=None, softcap=None, window=None):
    """FlashAttention 4 of its authors (CuTe DSL): output and log-sum-exp."""
    from flash_attn.cute import flash_attn_func

    return _call(flash_attn_func, "return_lse", q, k, v, causal, scale, softcap, window or (None, None))


def _call(function, keyword: str, q, k, v, causal, scale, softcap, window):
    options = {"causal": causal, "softmax_scale": scale, "softcap": softcap or 0.0, "window_size": window}
    return _heads_first(function(*_heads_last(q, k, v), **options, **_asking(function, keyword)))


def _xformers_bias(q, k, causal, mask, bias):
    """What xformers adds to the scores: its own causal mask (top left), or a tensor of the full shape."""
    from xformers.ops import LowerTriangularMask

    if causal + (mask is not None) + (bias is not None) > 1:
        raise ValueError("xformers takes causal order or a mask or a bias, got two of them: put all into the bias")
    extra = bias if mask is None else as_bias(mask, q.dtype)
    if extra is None:
        return LowerTriangularMask() if causal else None
    return extra.to(q.dtype).expand(*q.shape[:3], k.shape[2])


def xformers(q, k, v, *, causal: bool = False, mask=None, bias=None, scale=None) -> Tensor:
    """xformers' memory-efficient attention, whichever of its kernels it picks."""
    from xformers.ops import memory_efficient_attention

    extra = _xformers_bias(q, k, causal, mask, bias)
    return _heads_first(memory_efficient_attention(*_heads_last(q, k, v), attn_bias=extra, scale=scale))


def xformers_with_lse(q, k, v, *, causal: bool = False, mask=None) -> tuple[Tensor, Tensor]:
    """The forward pass of the same: output and log-sum-exp."""
    from xformers.ops.fmha import memory_efficient_attention_forward_requires_grad as forward

    out, lse = forward(*_heads_last(q, k, v), attn_bias=_xformers_bias(q, k, causal, mask, None))
    return out.transpose(1, 2), lse[..., : q.shape[2]]  # padded, as in PyTorch's own
