"""The truth: attention in float64, written in the plainest way, with no part shared with what it judges.

Shape letters: B batch, H query heads, Hkv key/value heads, L queries, S keys, D and Dv head sizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa_study.attention.features import check_features, check_shapes
from fa_study.attention.result import AttentionResult


def golden_scores(
    q: Tensor, k: Tensor, rows: slice, scale: float | None, softcap: float | None, bias: Tensor | None
) -> Tensor:
    """Scaled, capped, biased scores (B, H, rows, S) in float64."""
    q, k = q[:, :, rows].double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.mT * (1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    return s if bias is None else s + take_rows(bias, rows).double()


def live_keys(
    L: int,
    S: int,
    rows: slice,
    device: torch.device,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: str | None,
    window: tuple[int | None, int | None] | None,
) -> Tensor:
    """True where a row may see a key, broadcasting to (B, H, rows, S)."""
    i = torch.arange(L, device=device)[rows].unsqueeze(1) + (0 if causal == "top_left" else S - L)
    j = torch.arange(S, device=device)
    live = torch.ones(len(i), S, dtype=torch.bool, device=device)
    if causal is not None:
        live &= j <= i
    left, right = window if window is not None else (None, None)
    if left is not None and left >= 0:
        live &= j >= i - left
    if right is not None and right >= 0:
        live &= j <= i + right
    if mask is not None:
        live = live & take_rows(mask, rows)
    if bias is not None:
        live = live & (take_rows(bias, rows) != -math.inf)
    return live


def take_rows(x: Tensor, rows: slice) -> Tensor:
    return x[..., rows, :] if x.dim() > 1 and x.shape[-2] > 1 else x


def golden_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
) -> AttentionResult:
    """Attention in float64, whatever the inputs' dtype: ``out = softmax(scale q k^T) v``.

    Parameters are those of `fa_study.attention.baseline_attention`. Gradients flow through it, so that float64 autograd
    gives the true gradients. Rows are taken in chunks, so memory grows with L, not L x S.

    Returns
    -------
    AttentionResult
        out, lse and max_scores in float64; counts hold "nonfinite" alone.
    """
    shapes = check_shapes(q, k, v)
    check_features(shapes, scale=scale, mask=mask, bias=bias, causal=causal, window=window, softcap=softcap)
    values = v.double().repeat_interleave(shapes.H // shapes.Hkv, 1)
    finite = bool(values.isfinite().all())
    outs, lses, tops = [], [], []
    step = max(16, 2**24 // max(1, shapes.B * shapes.H * shapes.S))
    for start in range(0, max(shapes.L, 1), step):
        rows = slice(start, min(start + step, shapes.L))
        live = live_keys(shapes.L, shapes.S, rows, q.device, mask, bias, causal, window)
        s = golden_scores(q, k, rows, scale, softcap, bias).masked_fill(~live, -math.inf)
        top = s.amax(-1, keepdim=True) if shapes.S else s.new_full((*s.shape[:-1], 1), -math.inf)
        empty = top == -math.inf
        e = (s - top.masked_fill(empty, 0.0)).exp()
        total = e.sum(-1, keepdim=True)
        p = e / total.masked_fill(empty, 1.0)
        outs.append((p @ values if finite else _absent_where_dead(p, values, live)).masked_fill(empty, 0.0))
        lses.append((top + total.log()).masked_fill(empty, -math.inf).squeeze(-1))
        tops.append(top.squeeze(-1))
    out = torch.cat(outs, 2)
    counts = {"nonfinite": int((~out.isfinite()).sum())}
    return AttentionResult(out, torch.cat(lses, 2), counts, torch.cat(tops, 2))


def _absent_where_dead(p: Tensor, values: Tensor, live: Tensor) -> Tensor:
    """p @ values, where a key that a row may not see is absent even if its value is NaN or infinite: key by key."""
    out = torch.zeros_like(p[..., :1] * values[..., :1, :])
    live = live.expand(p.shape)
    for j in range(p.shape[-1]):
        term = p[..., j, None] * values[..., j, None, :]
        out = out + torch.where(live[..., j, None], term, torch.zeros_like(term))
    return out
