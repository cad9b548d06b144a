"""What an attention call returns, and how results over parts of the keys become one.

Shape letters: B batch, H heads, L queries, Dv head size of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionResult:
    """What an attention call returns.

    Attributes
    ----------
    out : Tensor (B, H, L, Dv)
        In the inputs' dtype where that holds the output format exactly, else in float32 or float64. A row without a key
        is 0.
    lse : Tensor (B, H, L)
        Natural logarithm of the row sum of exp(scores), in float32 or float64; -inf for a row without a key.
    counts : dict
        "tiles": tiles with a live key, over all heads. "rescalings": how often a row's maximum grew after its first
        tile. "overflows": per site, how many finite values became infinite, NaN or the largest finite value.
        "nonfinite": elements of `out` that are infinite or NaN.
    max_scores : Tensor (B, H, L)
        The largest score of each row (scaled, capped, biased), -inf for a row without a key.
    """

    out: Tensor
    lse: Tensor
    counts: dict = field(default_factory=dict)
    max_scores: Tensor | None = None


def merge_attention(results: Iterable[AttentionResult]) -> AttentionResult:
    """Attention over all keys from attention over parts of the keys (split-KV, flash decoding).

    ``out = sum_i w_i out_i / sum_i w_i`` with ``w_i = exp(lse_i - max lse)``, computed in float32 or wider; the result
    has the widest dtype of the parts. Rows that no part has a key for stay 0 with lse -inf. Counts and largest scores
    are those that all parts have.

    Raises
    ------
    ValueError
        If there is no result, or their shapes differ.
    """
    results = list(results)
    if not results:
        raise ValueError("merge_attention needs at least one result, got none")
    shapes = {tuple(r.out.shape) for r in results}
    if len(shapes) > 1:
        raise ValueError(f"merge_attention needs results of one shape, got {sorted(shapes)}")
    wide = reduce(torch.promote_types, [r.lse.dtype for r in results], torch.float32)
    dtype = reduce(torch.promote_types, [r.out.dtype for r in results])
    lses = torch.stack([r.lse.to(wide) for r in results])
    top = lses.amax(0)
    weights = (lses - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = weights.sum(0)
    parts = sum(w.unsqueeze(-1) * r.out.to(w.dtype) for w, r in zip(weights, results))
    empty = top == -math.inf
    out = (parts / total.unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0.0).to(dtype)
    shared = [name for name in ("tiles", "rescalings", "overflows") if all(name in r.counts for r in results)]
    counts = {name: sum(r.counts[name] for r in results) for name in shared if name != "overflows"}
    if "overflows" in shared:
        sites = results[0].counts["overflows"]
        counts["overflows"] = {site: sum(r.counts["overflows"][site] for r in results) for site in sites}
    counts["nonfinite"] = count_nonfinite(out)
    tops = [r.max_scores for r in results]
    largest = None if any(top is None for top in tops) else torch.stack([top.to(wide) for top in tops]).amax(0)
    return AttentionResult(out, top + total.log(), counts, largest)


def count_nonfinite(x: Tensor) -> int:
    """Number of NaN and infinite elements."""
    # A finite sum says that there is none, in one fast pass.
    return 0 if x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite() else int((~x.isfinite()).sum())
