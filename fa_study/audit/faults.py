"""Known mistakes, each computed in float64, so that a wrong result can be told by what it agrees with.

Shape letters: B batch, H query heads, Hkv key heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fa_study.attention import golden_attention
from fa_study.audit.cases import CLOSE, Case

PADDED_TO = (8, 16, 32, 64, 128, 256)
# A relative error up to here may be rounding alone, however careless.
ROUNDING = 0.04


def distance(theirs: Tensor, truth: Tensor) -> float:
    """Relative L2 distance; infinite where values are not finite although the truth's are."""
    difference = theirs.double() - truth.double()
    if not difference.isfinite().all():
        return math.inf
    return float(difference.norm() / truth.double().norm().clamp_min(1e-300))


def diagnose(theirs: Tensor, case: Case, values: dict[str, object]) -> tuple[str, str] | None:
    """(code, sentence) for an output that is not attention as asked for; None if it is.

    Parameters
    ----------
    theirs : (B, H, L, D), computed from ``case.inputs()`` with the features `values`.
    values : keywords of `golden_attention`.

    Returns
    -------
    The known fault that explains the output: within the dtype's tolerance, and three times closer than the truth. The
    code is "wrong" where no known fault does and more than rounding is amiss.
    """
    q, k, v = case.inputs()
    truth = golden_attention(q, k, v, **values)
    away = distance(theirs, truth.out)
    if away <= CLOSE[case.dtype]:
        return None
    if not theirs.isfinite().all():
        return "non-finite", f"{int((~theirs.isfinite()).sum())} of {theirs.numel()} values are infinite or NaN"
    found = [(distance(theirs, out), code, text) for code, text, out in _faults(q, k, v, values, truth)]
    nearest, code, text = min(found)
    if nearest <= min(2 * CLOSE[case.dtype], away / 3):
        return code, f"{text} (relative distance {nearest:.1e}, to the truth {away:.1e})"
    if away <= ROUNDING:
        return None
    return "wrong", f"relative error {away:.1e}, which no known fault explains"


def _faults(q: Tensor, k: Tensor, v: Tensor, values: dict, truth) -> Iterator[tuple[str, str, Tensor]]:
    D, S, L, H, Hkv = q.shape[3], k.shape[2], q.shape[2], q.shape[1], k.shape[1]

    def golden(**changed: object) -> Tensor:
        return golden_attention(q, k, v, **{**values, **changed}).out

    for size in sorted({-(-D // n) * n for n in PADDED_TO} | {2 ** math.ceil(math.log2(D))} - {D}):
        if values.get("scale") is None:
            yield "scale", f"the scale is that of a head size padded from {D} to {size}", golden(scale=size**-0.5)
    for size in (s for s in (32, 64, 128) if s < D and values.get("scale") is None):
        yield "scale", f"the scale is that of a head size of {size} instead of {D}", golden(scale=size**-0.5)
    for scale, text in ((1.0, "the scores are not scaled"), (1.0 / D, "the scale is 1/D instead of 1/sqrt(D)")):
        yield "scale", text, golden(scale=scale)
    for n in PADDED_TO:
        extra = -S % n
        if extra:
            # A padded key has the score 0 and the value 0: it only adds exp(0) to the row sum.
            share = (truth.lse - torch.logaddexp(truth.lse, torch.tensor(math.log(extra), dtype=torch.float64))).exp()
            text = f"{extra} padded keys (to a multiple of {n}) count in the row sum"
            yield "row-sum-padding", text, truth.out * share.unsqueeze(-1)
    for name in values:
        yield "ignored", f"{name} is accepted and ignored", golden(**{name: None})
    if values.get("mask") is not None:
        yield "mask-inverted", "the mask is read with True meaning hidden", golden(mask=~values["mask"])
        added = golden(mask=None, bias=values["mask"].double())
        yield "mask-added", "a boolean mask is added to the scores, as 1 and 0, and hides nothing", added
    if values.get("causal") is None:
        yield "causal-unasked", "causal although not asked for", golden(causal="top_left")
    else:
        other = {"top_left": "bottom_right", "bottom_right": "top_left"}[values["causal"]]
        if L != S:
            yield "alignment", f"aligned {other} instead of {values['causal']}", golden(causal=other)
        for shift in (-1, 1):
            for alignment in ("top_left", "bottom_right"):
                offset = shift + (S - L if alignment == "bottom_right" else 0)
                mask = torch.ones(L, S, dtype=torch.bool).tril(offset)
                seen = "one key too many" if shift > 0 else "one key too few"
                text = f"the causal limit is off by one ({alignment}, {seen})"
                yield "causal-shift", text, golden(causal=None, mask=_both(mask, values.get("mask")))
    if Hkv != H:
        G = H // Hkv
        for order, text in (
            (torch.arange(H) % Hkv, "query head j uses key head j % Hkv instead of j // (H / Hkv)"),
            (Hkv - 1 - torch.arange(H) // G, "the key heads are taken in reverse order"),
            (torch.zeros(H, dtype=torch.int64), "every query head uses key head 0"),
        ):
            yield "group-mapping", text, golden_attention(q, k[:, order], v[:, order], **values).out
    if values.get("softcap") is not None:
        # c tanh(q k / c) / sqrt(D) is the right order with c / sqrt(D) for c.
        scale = D**-0.5 if values.get("scale") is None else values["scale"]
        yield "order", "the softcap is applied before the scale", golden(softcap=values["softcap"] * scale)


def _both(a: Tensor, b: Tensor | None) -> Tensor:
    return a if b is None else a & b
