"""Attentions with the arguments of `torch.nn.functional.scaled_dot_product_attention`, and what puts them in its place.

Shape letters: B batch, H query heads, Hkv key heads, L queries, S keys, D head size, Dv head size of the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fa_study.attention.gradients import tiled_attention
from fa_study.rounding import RoundingPolicy

_FORMATS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Replace(TorchFunctionMode):
    """While open, another function is called in place of PyTorch's attention."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            function = self.function
        return function(*args, **(kwargs or {}))


def _expanded(q: Tensor, attn_mask: Tensor | None, S: int, is_causal: bool) -> dict[str, Tensor | None]:
    """PyTorch's causal limit (top left) or its mask, as a mask (True = attend) and a bias."""
    if is_causal:
        return {"mask": torch.ones(q.shape[-2], S, dtype=torch.bool, device=q.device).tril(), "bias": None}
    masks = attn_mask is not None and attn_mask.dtype == torch.bool
    return {"mask": attn_mask if masks else None, "bias": None if masks else attn_mask}


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Eager attention with the arguments of PyTorch's: out = round(P) V, P = softmax in FP32 of rounded scores.

    q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) give (B, H, L, Dv), all in one dtype.
    """
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    extra = _expanded(q, attn_mask, k.shape[-2], is_causal)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if extra["bias"] is not None:
        scores = scores + extra["bias"]
    if extra["mask"] is not None:
        scores = scores.masked_fill(~extra["mask"], -math.inf)
    probabilities = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32))
    return probabilities.to(v.dtype) @ v


def emulated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """FlashAttention 2 as this package emulates it, with the arguments of PyTorch's attention."""
    policy = RoundingPolicy.kernel(_FORMATS[q.dtype])
    extra = _expanded(q, attn_mask, k.shape[-2], is_causal)
    return tiled_attention(q, k, v, policy=policy, scale=scale, **extra)
