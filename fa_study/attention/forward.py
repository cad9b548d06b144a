"""The forward pass: the baseline and FlashAttention 1, 2 and 4, with a format per rounding site.

Shape letters: B batch, H query heads, Hkv key/value heads (Hkv divides H), L queries, S keys, D and Dv head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral

import torch
from torch import Tensor

from fa_study.attention.baseline import run_baseline
from fa_study.attention.call import Call
from fa_study.attention.exponentials import Exponential
from fa_study.attention.features import as_number, check_features, check_positive, check_shapes
from fa_study.attention.result import AttentionResult, count_nonfinite
from fa_study.attention.sites import result_dtype
from fa_study.attention.tile_products import float32_products
from fa_study.attention.tiles import ALGORITHMS, Shift, TileOptions, run_tiles
from fa_study.rounding import RoundingPolicy


def baseline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    policy: RoundingPolicy,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    exp: Exponential = "exact",
    generator: torch.Generator | None = None,
) -> AttentionResult:
    """Attention as it is written out: ``out = softmax(scale q k^T) v`` over whole rows, rounded as the policy says.

    ``s = q k^T; s = scale s; e = exp(s - max s); p = e / sum e; out = p v``, one rounding after each step:
    `RoundingPolicy.eager` gives the usual 16-bit Baseline.

    Parameters
    ----------
    q, k, v : Tensor
        (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv), any floating dtype. Query head j uses key head j // (H / Hkv).
    policy : RoundingPolicy
    scale : float, optional
        By default 1 / sqrt(D). The features apply in the order scale, softcap, bias, mask.
    mask : bool Tensor, optional
        True = attend; broadcasts to (B, H, L, S).
    bias : Tensor, optional
        Added to the scores, in float32 or wider; -inf masks, a finite number never does. Broadcasts to (B, H, L, S).
    causal : {None, "top_left", "bottom_right"}
        Row i sees keys up to i, or up to i + S - L.
    window : (left, right), optional
        Row i, aligned as `causal` says (bottom-right if None), sees `left` keys before and `right` keys after its own;
        None for no limit.
    softcap : float, optional
        c > 0: scores become ``c tanh(s / c)``.
    exp : {"exact", "exp2_fma", "fexp_u20"} or callable
        See `fa_study.attention.exponentials.shifted_exp`.
    generator : torch.Generator, optional
        For stochastic rounding. The same state gives the same bits.

    Raises
    ------
    ValueError
        If shapes or options do not fit. NaN and infinities in the input are no error: they flow to the outputs that
        depend on them, and what is masked does not.
    """
    shapes = check_shapes(q, k, v)
    features = check_features(shapes, scale=scale, mask=mask, bias=bias, causal=causal, window=window, softcap=softcap)
    call = Call(q, k, v, shapes, features, policy, exp, generator)
    return _collect(call, run_baseline(call), q.dtype)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    policy: RoundingPolicy,
    tile: tuple[int, int] = (64, 64),
    algorithm: str = "fa2",
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    exp: Exponential = "exact",
    generator: torch.Generator | None = None,
    key_order: str = "forward",
    rescale_threshold: float = 8.0,
    probability_scale: float = 1.0,
    shift: Shift | None = None,
    key_offset: Callable[[Tensor], Tensor] | None = None,
) -> AttentionResult:
    """Attention tile by tile, with a running maximum and row sum: FlashAttention 1, 2 or 4.

    Parameters
    ----------
    q, k, v, policy, scale, mask, bias, causal, window, softcap, exp, generator
        As in `baseline_attention`.
    tile : (Br, Bc)
        Rows and keys of a tile. Br only groups rows: it changes the counts and no bit of the result, except with
        stochastic rounding when L needs several chunks, since the random numbers then fall on other elements.
    algorithm : {"fa1", "fa2", "fa4"}
        fa1: O normalised at each tile. fa2: O divided by the row sum once, at the end. fa4: as fa2, and the maximum
        grows only by more than `rescale_threshold`. Formulas in `fa_study.attention.tiles`.
    key_order : {"forward", "reverse"}
        FlashAttention 2 visits the key tiles from last to first.
    rescale_threshold : float
        For fa4, in log2 units, not negative. A row's first maximum is always taken; with infinity it is the only one.
    probability_scale : float
        Positive. P is multiplied by it before it is rounded, and the product with V divided by it, as FP8 kernels do
        with 2**8.
    shift : callable, optional
        ``shift(scores (B, H, R, W), running_max (B, H, R, 1))`` gives what is subtracted from the scores instead of the
        running maximum (the larger of what was subtracted so far and the tile's maximum). Masked scores are -inf.
    key_offset : callable, optional
        ``key_offset(k_tile (B, Hkv, W, D))`` gives what is subtracted from the keys, (B, Hkv, 1, D) or broadcasting to
        it; its effect on the scores is undone in the maximum.

    Raises
    ------
    ValueError
        As in `baseline_attention`, and if the tile, the algorithm, the key order, the threshold or the scale of P makes
        no sense.
    """
    Br, Bc = check_tile(tile)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown: use one of {', '.join(ALGORITHMS)}")
    if key_order not in ("forward", "reverse"):
        raise ValueError(f"key_order={key_order!r} is unknown: use 'forward' or 'reverse'")
    if key_offset is not None and softcap is not None:
        raise ValueError("key_offset cannot be undone behind a softcap: use one of the two")
    if not as_number(rescale_threshold) >= 0:
        raise ValueError(f"rescale_threshold={rescale_threshold!r}: use a number >= 0, in log2 units")
    probability_scale = check_positive("probability_scale", probability_scale)
    shapes = check_shapes(q, k, v)
    features = check_features(shapes, scale=scale, mask=mask, bias=bias, causal=causal, window=window, softcap=softcap)
    call = Call(
        q,
        k,
        v,
        shapes,
        features,
        policy,
        exp,
        generator,
        growth=rescale_threshold * math.log(2) if algorithm == "fa4" else 0.0,
        probability_scale=probability_scale,
        key_offset=key_offset,
        hooked=shift is not None or key_offset is not None,
        native_width=min(Bc, shapes.S),
    )
    options = TileOptions(Br, Bc, algorithm, key_order == "reverse", rescale_threshold, shift)
    return _collect(call, run_tiles(call, options), q.dtype)


def check_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """(Br, Bc), or ValueError."""
    ok = isinstance(tile, Sequence) and len(tile) == 2
    if not ok or not all(isinstance(n, Integral) and not isinstance(n, bool) and n > 0 for n in tile):
        raise ValueError(f"tile={tile!r}: use (rows, keys), two positive whole numbers such as (64, 64)")
    return int(tile[0]), int(tile[1])


def _collect(call: Call, chunks: Iterable, given: torch.dtype) -> AttentionResult:
    """The chunks put together."""
    s, policy, device = call.shapes, call.policy, call.q.device
    out = torch.zeros(s.B, s.H, s.L, s.Dv, dtype=result_dtype(given, policy.output.format), device=device)
    wide = torch.promote_types(policy.carrier, torch.float32)
    lse = torch.full((s.B, s.H, s.L), -math.inf, dtype=wide, device=device)
    largest = lse.clone()
    counts = {"tiles": 0, "rescalings": 0}
    if lse.numel() and s.S:
        # A model's autocast would run float32 products in 16 bits.
        precision = "bf16" if call.paths.narrow_values else "ieee"
        with torch.no_grad(), torch.autocast(device.type, enabled=False), float32_products(precision):
            for chunk, o, log_sum, top, counted in chunks:
                place = (*chunk.place, chunk.rows)
                out[place] = o[:, :, : chunk.length, : s.Dv].to(out.dtype)
                lse[place] = log_sum[:, :, : chunk.length, 0].to(wide)
                largest[place] = top[:, :, : chunk.length, 0].to(wide)
                counts = {name: counts[name] + counted[name] for name in counts}
    counts["overflows"] = dict(call.sites.overflows)
    counts["nonfinite"] = count_nonfinite(out)
    return AttentionResult(out, lse, counts, largest)
