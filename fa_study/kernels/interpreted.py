"""Kernels for other machines, run on a CPU by interpreters: JAX's Pallas kernels, flash-attn's Triton kernels.

Shape letters: B batch, H query heads, Hkv key heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import torch
from torch import Tensor


def _to_jax(x: Tensor):
    import jax.numpy as jnp

    # NumPy has no bfloat16 of its own: float32 holds its values exactly.
    wide = jnp.asarray(x.detach().float().numpy())
    return wide.astype({torch.bfloat16: jnp.bfloat16, torch.float16: jnp.float16}.get(x.dtype, jnp.float32))


def _to_torch(x, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(x, dtype=np.float32)).to(dtype)


class _ThroughJax(torch.autograd.Function):
    """A JAX function of (q, k, v) with its own gradients, called in a context of `mode`."""

    @staticmethod
    def forward(ctx, function, mode, q, k, v):
        import jax

        ctx.mode, inputs = mode, [_to_jax(x) for x in (q, k, v)]
        with mode():
            if not any(ctx.needs_input_grad):
                return _to_torch(function(*inputs), q.dtype)
            out, ctx.back = jax.vjp(function, *inputs)
        return _to_torch(out, q.dtype)

    @staticmethod
    def backward(ctx, gradient):
        with ctx.mode():
            return None, None, *(_to_torch(g, gradient.dtype) for g in ctx.back(_to_jax(gradient)))


def pallas_tpu(q, k, v, *, causal: bool = False, mask=None, bias=None, scale: float | None = None) -> Tensor:
    """JAX's Pallas flash attention for TPUs, in interpret mode. Lengths are multiples of 128.

    Its masks are segments: a mask hides whole keys and whole queries, the same in all heads.
    """
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    extra = None if bias is None else _to_jax(bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    segments = None if mask is None else _segments(mask.expand(q.shape[0], -1, q.shape[2], k.shape[2]))
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def call(q, k, v):
        return flash_attention(q, k, v, extra, segments, causal=causal, sm_scale=factor)

    return _ThroughJax.apply(call, tpu.force_tpu_interpret_mode, q, k, v)


def _segments(mask: Tensor):
    """Segments of queries and keys that hide what a mask (B, 1, L, S) hides; a query sees the keys of its segment."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds

    rows, keys = mask.any(3), mask.any(2)
    if mask.shape[1] > 1 or not torch.equal(mask, rows.unsqueeze(3) & keys.unsqueeze(2)):
        raise ValueError("the mask has to hide whole keys and whole queries, in all heads alike: segments say no more")
    q, kv = torch.where(rows[:, 0], 1, 2), torch.where(keys[:, 0], 1, 0)
    return SegmentIds(*(jnp.asarray(x.int().numpy()) for x in (q, kv)))


def pallas_gpu(q, k, v, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """JAX's Pallas attention for GPUs, in interpret mode."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def call(q, k, v):
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        out = mha(q, k, v, None, sm_scale=factor, causal=causal, interpret=True)
        return out.transpose(0, 2, 1, 3)

    return _ThroughJax.apply(call, contextlib.nullcontext, q, k, v)


class _TritonFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        kernels = _triton_kernels()
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out, lse, *_ = kernels.fwd(q, k, v, None, None, 0.0, scale, causal, -1, -1, 0.0, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = (scale, causal)
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(ctx, gradient, _):
        q, k, v, out, lse = ctx.saved_tensors
        scale, causal = ctx.options
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        dout = gradient.transpose(1, 2).contiguous()
        _triton_kernels().bwd(dout, q, k, v, out, lse, *grads, None, 0.0, scale, causal, -1, -1, 0.0, False)
        return *(g.transpose(1, 2) for g in grads), None, None


# Triton reads its switch when it is imported first, which PyTorch may do long before: it has to be set outside.
SWITCHES = {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE", "TRITON_INTERPRET": "1"}


def missing_switches() -> str:
    """What has to be set before Python starts so that the Triton kernels run here, "" if nothing."""
    missing = [f"{name}={value}" for name, value in SWITCHES.items() if os.environ.get(name) != value]
    return f"set {' '.join(missing)} before Python starts" if missing else ""


def _triton_kernels():
    from flash_attn.flash_attn_triton_amd import interface_fa

    return interface_fa


def flash_attn_triton(q, k, v, *, causal: bool = False, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """The flash-attn package's own Triton kernels through Triton's interpreter: output and log-sum-exp."""
    return _TritonFlash.apply(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)
