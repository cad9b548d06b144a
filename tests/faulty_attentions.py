"""Attentions with one planted mistake each, for the tests of the audit. All take (q, k, v) and a few features.

Shape letters: B batch, H query heads, Hkv key heads, G = H / Hkv, L queries, S keys, D head size.
"""

import math

import torch


def written_out(q, k, v, *, causal=False, mask=None, scale=None, groups=None, fill=-math.inf, offset=0):
    """Attention as it stands in textbooks, in the inputs' dtype with the softmax in FP32: sound as it is."""
    G = q.shape[1] // k.shape[1]
    heads = torch.arange(q.shape[1]) // G if groups is None else groups(q.shape[1], k.shape[1])
    k, v = k[:, heads], v[:, heads]
    s = ((q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)).float()
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + offset), fill)
    if mask is not None:
        s = s.masked_fill(~mask, fill)
    return torch.softmax(s, -1).to(v.dtype) @ v


def sound(q, k, v, causal=False, mask=None, scale=None):
    return written_out(q, k, v, causal=causal, mask=mask, scale=scale)


def padding_in_row_sum(q, k, v):
    s = (q @ k.mT).float() * q.shape[-1] ** -0.5
    e = s.exp()
    padded = -k.shape[2] % 32
    return (e / (e.sum(-1, keepdim=True) + padded)).to(v.dtype) @ v


def scale_of_padded_head(q, k, v):
    return written_out(q, k, v, scale=(-(-q.shape[-1] // 32) * 32) ** -0.5)


def causal_off_by_one(q, k, v, causal=False):
    return written_out(q, k, v, causal=causal, offset=1)


def wrong_alignment(q, k, v, causal=None):
    """Bottom right is promised, top left is done."""
    assert causal in (None, "top_left", "bottom_right")
    return written_out(q, k, v, causal=causal is not None)


def finite_mask(q, k, v, mask=None):
    return written_out(q, k, v, mask=mask, fill=-1e4)


def lowest_number_as_mask(q, k, v, mask=None):
    return written_out(q, k, v, mask=mask, fill=torch.finfo(torch.float32).min)


def wrong_groups(q, k, v):
    return written_out(q, k, v, groups=lambda H, Hkv: torch.arange(H) % Hkv)


def ignores_its_mask(q, k, v, mask=None):
    return written_out(q, k, v)


def adds_its_mask(q, k, v, mask=0):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + mask, -1) @ v


def softcap_before_scale(q, k, v, softcap=None):
    s = q @ k.mT
    return torch.softmax((s if softcap is None else softcap * torch.tanh(s / softcap)) * q.shape[-1] ** -0.5, -1) @ v


def _tiled(q, k, v, *, accumulator=torch.float32, row_sum=torch.float32, cast=None, size=64):
    """FlashAttention 2's loop, with the dtype of two running sums and the final cast as arguments."""
    m = torch.full((*q.shape[:3], 1), -math.inf)
    l = torch.zeros_like(m).to(row_sum)
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=accumulator)
    for j in range(0, k.shape[2], size):
        s = (q.float() @ k[:, :, j : j + size].float().mT) * q.shape[-1] ** -0.5
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, a = (s - new).exp(), (m - new).exp()
        l = (l * a.to(row_sum) + p.sum(-1, keepdim=True).to(row_sum)).to(row_sum)
        o = (o.float() * a + p.to(v.dtype).float() @ v[:, :, j : j + size].float()).to(accumulator)
        m = new
    out = o.float() / l.float()
    return cast(out, v.dtype) if cast else out.to(v.dtype)


def tiled(q, k, v):
    return _tiled(q, k, v)


def bf16_accumulator(q, k, v):
    return _tiled(q, k, v, accumulator=torch.bfloat16)


def bf16_row_sum(q, k, v):
    return _tiled(q, k, v, row_sum=torch.bfloat16, size=32)


def _truncated(x, dtype):
    if dtype != torch.bfloat16:
        return x.to(dtype)
    return (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


def truncating_cast(q, k, v):
    return _tiled(q, k, v, cast=_truncated)


def few_shapes(q, k, v):
    """Sound, and refuses all but what its blocks divide, as many kernels do."""
    assert q.shape == k.shape and q.shape[2] % 128 == 0 and q.shape[3] == 64 and q.dtype == torch.float32
    return written_out(q, k, v)
