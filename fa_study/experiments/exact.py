"""Attention in extended precision, for judging results in FP64 and the golden value itself."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def extended_attention(q: Tensor, k: Tensor, v: Tensor) -> np.ndarray:
    """softmax(q k^T / sqrt(D)) v in NumPy's longdouble: 64 bits of precision on x86, which has 11 more than FP64.

    Parameters
    ----------
    q, k, v : (B, H, L, D), (B, H, S, D), (B, H, S, Dv) in float64.

    Raises
    ------
    ValueError : on this machine longdouble is no wider than FP64.
    """
    if np.finfo(np.longdouble).nmant <= 52:
        raise ValueError("this machine's longdouble is no wider than FP64: compute FP64 errors on an x86 machine")
    q, k, v = (x.numpy().astype(np.longdouble) for x in (q, k, v))
    return np.stack([_attention(*entry) for entry in zip(q, k, v)])


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(np.longdouble(q.shape[-1]))
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


def golden_error(q: Tensor, k: Tensor, v: Tensor, golden: Tensor) -> float:
    """Largest |golden - extended| / rms(extended): how far the golden value itself can be trusted."""
    extended = extended_attention(q, k, v)
    difference = np.abs(golden.numpy() - extended).max()
    return float(difference / np.sqrt(np.square(extended).mean()))
