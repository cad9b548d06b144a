"""The specification: one head of FlashAttention as a plain loop over rows and key blocks, one rounding per operation.

Slow on purpose, and without a trick; the fast paths are tested against it. Shapes: q (L, D), k (S, D), v (S, Dv).
"""

import math

import torch

from fa_study.attention.exponentials import exact_exp
from fa_study.attention.products import matmul


def reference_attention(
    q, k, v, policy, Bc, algorithm="fa2", scale=None, softcap=None, bias=None, live=None, threshold=8.0, reverse=False
):
    """(out (L, Dv), lse (L,)) in the policy's carrier. bias and live (False = masked) are (L, S)."""
    q, k, v = (policy.inputs(x.to(policy.carrier)) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    live = torch.ones(len(q), len(k), dtype=torch.bool) if live is None else live
    out, lse = q.new_zeros(len(q), v.shape[1]), q.new_full((len(q),), -math.inf)
    for i in range(len(q)):
        m, l, o = q.new_tensor(-math.inf), q.new_tensor(0.0), q.new_zeros(v.shape[1])
        starts = range(0, len(k), Bc)
        for start in reversed(starts) if reverse else starts:
            keys = torch.arange(start, min(start + Bc, len(k)))
            keys = keys[live[i, keys]]  # a masked key is an absent key
            if len(keys) == 0:
                continue
            s = policy.scores(matmul(q[i : i + 1], k[keys].T, policy.products)[0])
            s = policy.scores(s * scale)
            if softcap is not None:
                s = policy.scores(softcap * torch.tanh(s / softcap))
            if bias is not None:
                s = policy.scores(s + bias[i, keys].to(s.dtype))
            new_m = policy.max(torch.maximum(m, s.max()))
            if algorithm == "fa4" and m > -math.inf and (new_m - m) * math.log2(math.e) <= threshold:
                new_m = m
            unrounded = exact_exp(policy.exponentials(s - new_m))
            e = policy.exponentials(unrounded)
            narrow = policy.exponentials.format.mantissa_bits < policy.probabilities.format.mantissa_bits
            p = policy.probabilities(e if narrow else unrounded)
            a = policy.rescale(exact_exp(policy.rescale(m - new_m)))
            old_l = policy.sum(a * l)
            l = policy.sum(old_l + policy.sum(e.sum()))
            pv = policy.accumulator(matmul(p[None], v[keys], policy.products)[0])
            o = policy.accumulator((old_l if algorithm == "fa1" else a) * o)
            o = policy.accumulator(o + pv)
            if algorithm == "fa1":
                o = policy.accumulator(o / l)
            m = new_m
        if m > -math.inf or m.isnan():
            out[i] = policy.output(o if algorithm == "fa1" else o * policy.sum(1 / l))
            lse[i] = policy.lse(m + l.log())
    return out, lse
