"""What bounds of the inputs allow: whether a site can overflow, and which fast paths keep every bit.

The native path keeps bfloat16 tensors, whose own arithmetic rounds, where a policy is BF16 throughout; the matrix units
multiply BF16 values that float32 tensors carry. Both are taken only where no subnormal number can occur, because matrix
units flush those to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fa_study.attention.exponentials import Exponential
from fa_study.attention.features import Features
from fa_study.attention.tile_products import bf16_products, float32_products, round_up, slab
from fa_study.formats import BF16, FP32
from fa_study.rounding import SITES, Rounding, RoundingPolicy


@dataclass(frozen=True)
class Paths:
    """What holds for one call.

    Attributes
    ----------
    finite_qk, finite_v : no NaN and no infinity in Q and K, in V.
    risky : some site may overflow, or its values are unknown: overflows are counted.
    mild : no exponential can be tiny, so that `torch.exp` is the exact exponential.
    narrow_scores, narrow_values : the products of Q and K, of P and V run on the matrix units.
    casts_probabilities : the matrix units round P to BF16 as the policy does.
    scaled_queries : the scale is a power of two that Q can be multiplied by instead of the scores.
    native : all tensors are bfloat16.
    """

    finite_qk: bool
    finite_v: bool
    risky: bool
    mild: bool
    narrow_scores: bool
    narrow_values: bool
    casts_probabilities: bool
    scaled_queries: bool
    native: bool


def choose_paths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Features,
    policy: RoundingPolicy,
    exp: Exponential,
    *,
    growth: float,
    probability_scale: float,
    hooked: bool,
    native_width: int,
) -> Paths:
    """The paths of a call with rounded inputs q, k, v. NaN and infinities in them only lead to the careful way."""
    raw, score = largest_score(q, k, features.scale)
    value = float(v.abs().max()) if v.numel() else 0.0
    finite_qk, finite_v = math.isfinite(raw), math.isfinite(value)
    if features.bias is not None:
        score += float(features.bias.masked_fill(features.bias == -math.inf, 0).abs().max())
    hooked = hooked or callable(exp) or not (finite_qk and finite_v)
    risky = hooked or overflow_possible(policy, raw, score, value, k.shape[2], growth, probability_scale)
    units = not risky and q.device.type == "cpu"
    if units:
        smallest_score = smallest(q) * smallest(k) * min(1.0, abs(features.scale))
        units = min(smallest_score, smallest(v) * math.exp(-2.1 * min(score, 400))) > 2.0**-100
    bf16 = units and bf16_products()
    narrow_scores = bf16 and _within_bf16(policy.inputs)
    narrow_values = narrow_scores and _within_bf16(policy.probabilities)
    plain = _is_plain(policy)
    return Paths(
        finite_qk,
        finite_v,
        risky,
        mild=not risky and 2.1 * score + growth < 80,
        narrow_scores=narrow_scores,
        narrow_values=narrow_values,
        casts_probabilities=narrow_values
        and plain
        and policy.carrier == torch.float32
        and policy.probabilities == Rounding(BF16)
        and _units_round(),
        scaled_queries=units and plain and math.frexp(features.scale)[0] == 0.5 and _keeps_powers_of_two(policy.scores),
        native=bf16
        and 0 < native_width <= slab(torch.bfloat16)
        and round_up(q.shape[3], 16) <= slab(torch.bfloat16)
        and exp == "exact"
        and probability_scale == 1
        and plain
        and all(getattr(policy, s) == Rounding(BF16) for s in SITES if not s.startswith(("grad", "delta"))),
    )


def largest_score(q: Tensor, k: Tensor, scale: float) -> tuple[float, float]:
    """Bounds (of q k^T, of the scaled scores) by |q . k| <= |q| |k|; NaN or infinite if an input is not finite."""
    bound = _largest_norm(q) * _largest_norm(k) * 1.0001
    return bound, bound * abs(scale)


def _largest_norm(x: Tensor) -> float:
    if not x.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(x, dim=-1).max())
    # Squares beyond float32's range need float64.
    return norm if 1e-15 < norm < 1e18 else float(x.double().norm(dim=-1).max())


def overflow_possible(
    policy: RoundingPolicy, raw: float, score: float, value: float, keys: int, growth: float, probability_scale: float
) -> bool:
    """Whether some site could overflow, given bounds of the values that reach it.

    raw, score: largest |q k^T| and largest scaled, biased score; value: largest |v|; growth: how far, in natural log
    units, a score may lie above the maximum that is subtracted (FlashAttention 4 keeps an old one).
    """
    # A rounded maximum may lie below the true one by a unit roundoff.
    top = math.exp(min(growth + 2 * score * policy.max.format.unit_roundoff, 700.0)) * 1.01
    bounds = {
        "scores": 1.01 * max(raw, score),
        "max": score,
        "exponentials": max(2.1 * score + growth, top),
        "probabilities": top * probability_scale,
        "sum": top * keys * 1.1,
        "accumulator": top * keys * 1.1 * max(value, 1.0) * max(probability_scale, 1.0),
        "output": 1.1 * value,
        "lse": score + math.log(max(keys, 1)) + 1,
    }
    carrier_max = torch.finfo(policy.carrier).max
    return not all(bound < 0.9 * min(getattr(policy, site).format.max, carrier_max) for site, bound in bounds.items())


def smallest(x: Tensor) -> float:
    """The smallest magnitude other than 0, at most 1."""
    size = x.abs()
    least = float(size.amin()) if size.numel() else 1.0
    return min(least, 1.0) if least > 0 else float(size.masked_fill_(size == 0, 1.0).amin().clamp(max=1.0))


def _within_bf16(rounding: Rounding) -> bool:
    return rounding.format.mantissa_bits <= BF16.mantissa_bits and rounding.format.exponent_bits <= BF16.exponent_bits


def _keeps_powers_of_two(rounding: Rounding) -> bool:
    """Whether rounding and multiplying by a power of two can change places where nothing is tiny."""
    return rounding.mode == "nearest_even" and rounding.format.exponent_bits >= FP32.exponent_bits


def _is_plain(policy: RoundingPolicy) -> bool:
    """Whether sums inside products are kept in FP32, all of them."""
    products = policy.products
    return products.every is None and products.promote is None and products.format == Rounding(FP32)


@cache
def _units_round() -> bool:
    """Whether this processor's products round float32 operands to BF16, to nearest even; without units it does not."""
    x = 1 + torch.arange(32 * 64).reshape(1, 32, 64) * 2.0**-10
    eye = torch.eye(64)[None]
    with float32_products("bf16"):
        return torch.equal(torch.bmm(x, eye), x.bfloat16().float())
