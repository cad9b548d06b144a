"""Attention that says where every bit was lost. Every rounding site is a field of a `RoundingPolicy`.

`baseline_attention` is written out over whole rows, `flash_attention` goes tile by tile (FlashAttention 1, 2 and 4),
`golden_attention` is the truth in float64; `merge_attention` joins results over parts of keys, `attention_gradients`
is the backward pass, and `tiled_attention` the differentiable form that models train with. The plain loop that defines
what they compute is `fa_study.attention.reference`.
"""

from fa_study.attention.forward import baseline_attention, flash_attention
from fa_study.attention.golden import golden_attention
from fa_study.attention.gradients import attention_gradients, tiled_attention
from fa_study.attention.result import AttentionResult, merge_attention

__all__ = [
    "AttentionResult",
    "attention_gradients",
    "baseline_attention",
    "flash_attention",
    "golden_attention",
    "merge_attention",
    "tiled_attention",
]
