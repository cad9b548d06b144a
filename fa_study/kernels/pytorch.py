"""PyTorch's own kernels: scaled_dot_product_attention by backend, and FlexAttention.

Shape letters: B batch, H query heads, Hkv key heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention


def _sdpa(backend: SDPBackend, q, k, v, causal, mask, bias, scale) -> Tensor:
    if mask is not None and bias is not None:
        raise ValueError("PyTorch's attention takes a mask or a bias, got both: put the mask into the bias, as -inf")
    extra = bias if mask is None else mask
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=extra, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def flash(q, k, v, *, causal: bool = False, mask=None, bias=None, scale: float | None = None) -> Tensor:
    """The flash kernel of the tensors' device. On CUDA it takes no mask and no bias."""
    return _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal, mask, bias, scale)


def math(q, k, v, *, causal: bool = False, mask=None, bias=None, scale: float | None = None) -> Tensor:
    """The math kernel: FP32 inside for 16-bit inputs."""
    return _sdpa(SDPBackend.MATH, q, k, v, causal, mask, bias, scale)


def math_reduced(q, k, v, *, causal: bool = False, mask=None, bias=None, scale: float | None = None) -> Tensor:
    """The math kernel that keeps 16-bit inputs in 16 bits."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        return math(q, k, v, causal=causal, mask=mask, bias=bias, scale=scale)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def efficient(q, k, v, *, causal: bool = False, mask=None, bias=None, scale: float | None = None) -> Tensor:
    """The memory-efficient CUDA kernel."""
    return _sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v, causal, mask, bias, scale)


def cudnn(q, k, v, *, causal: bool = False, mask=None, bias=None, scale: float | None = None) -> Tensor:
    """cuDNN's CUDA kernel."""
    return _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal, mask, bias, scale)


def as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask (True = attend) as numbers to add: 0 and -inf."""
    return None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


# scaled_dot_product_attention keeps the log-sum-exp to itself; its operators do not. They take no mask but as a bias.
def flash_cpu_with_lse(q, k, v, *, causal: bool = False, mask=None) -> tuple[Tensor, Tensor]:
    """The CPU flash kernel's operator: output and log-sum-exp."""
    extra = as_bias(mask, q.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=extra)


def efficient_with_lse(q, k, v, *, causal: bool = False, mask=None) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel's operator: output and log-sum-exp."""
    extra = None if mask is None else as_bias(mask, q.dtype).expand(*q.shape[:3], k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, extra, True, 0.0, causal)
    return out, lse[:, :, : q.shape[2]]  # padded to a multiple of 32 rows


def cudnn_with_lse(q, k, v, *, causal: bool = False, mask=None) -> tuple[Tensor, Tensor]:
    """cuDNN's operator: output and log-sum-exp."""
    extra = None if mask is None else as_bias(mask, q.dtype).expand(*q.shape[:3], k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, extra, True, 0.0, causal)
    return out, lse.reshape(q.shape[:3])


def _flex(function, q, k, v, mask, bias, softcap, scale, with_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """FlexAttention; what it hides is said by a function of the indices, so causal order is the caller's own."""
    block_mask = score_mod = None
    if mask is not None:
        full = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).contiguous()

        def mask_mod(b, h, i, j):
            return full[b, h, i, j]

        block_mask = create_block_mask(mask_mod, *full.shape, device=str(q.device))
    if softcap is not None or bias is not None:
        whole = None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).contiguous()

        def score_mod(s, b, h, i, j):
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            return s if whole is None else s + whole[b, h, i, j]

    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale}
    options |= {"enable_gqa": q.shape[1] != k.shape[1], "return_aux": AuxRequest(lse=True) if with_lse else None}
    result = function(q, k, v, **options)
    return (result[0], result[1].lse) if with_lse else result


def flex_eager(
    q, k, v, *, mask=None, bias=None, softcap: float | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """FlexAttention as it runs without torch.compile, by the whole matrix of scores: output and log-sum-exp."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return _flex(flex_attention, q, k, v, mask, bias, softcap, scale, True)


@functools.cache
def _compiled():
    # Without fullgraph, PyTorch would go on uncompiled and unsaid after its limit of recompilations.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex_compiled(q, k, v, *, mask=None, scale: float | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """FlexAttention compiled for the tensors' device, anew for every shape; on CUDA with its log-sum-exp."""
    if not q.is_cuda and q.requires_grad:
        raise NotImplementedError("FlexAttention has no backward pass on a CPU")
    return _flex(_compiled(), q, k, v, mask, None, None, scale, q.is_cuda)
