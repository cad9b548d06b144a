"""What is spared where it has no effect changes no bit: short steps, scaled queries, the matrix units' own rounding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa_study.attention import flash_attention, operands, tiles
from fa_study.attention.exponentials import EXPONENTIALS
from fa_study.rounding import RoundingPolicy

POLICIES = {
    "kernel bf16": (RoundingPolicy.kernel("bf16"), torch.bfloat16),
    "kernel fp16": (RoundingPolicy.kernel("fp16"), torch.float16),
    "kernel bf16, row sum of rounded P": (RoundingPolicy.kernel("bf16").replace(exponentials="bf16"), torch.bfloat16),
    "fp32": (RoundingPolicy.uniform("fp32"), torch.float32),
    "uniform bf16": (RoundingPolicy.uniform("bf16"), torch.bfloat16),
}


def spared_nothing(choose):
    def chosen(*arguments, **options):
        return dataclasses.replace(choose(*arguments, **options), casts_probabilities=False, scaled_queries=False)

    return chosen


@pytest.mark.parametrize("exp", EXPONENTIALS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("keys", [256, 200])
def test_nothing_that_is_spared_changes_a_bit(name, exp, keys, monkeypatch):
    policy, dtype = POLICIES[name]
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 300, 64), torch.randn(2, 2, keys, 64), torch.randn(2, 2, keys, 48)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    got = flash_attention(q, k, v, policy=policy, tile=(32, 64), exp=exp)
    assert got.counts["rescalings"] > 0
    monkeypatch.setattr(operands, "choose_paths", spared_nothing(operands.choose_paths))
    monkeypatch.setattr(tiles, "_is_plain", lambda *_: False)
    want = flash_attention(q, k, v, policy=policy, tile=(32, 64), exp=exp)
    for a, b in ((got.out, want.out), (got.lse, want.lse), (got.max_scores, want.max_scores)):
        assert torch.equal(a, b)
    assert got.counts == want.counts


def test_the_short_step_is_taken_and_only_where_it_may_be(monkeypatch):
    taken = []
    step = tiles._add_plain_tile
    monkeypatch.setattr(tiles, "_add_plain_tile", lambda *a: (taken.append(1), step(*a)))
    q, k, v = (torch.randn(1, 2, 64, 32).bfloat16() for _ in range(3))
    flash_attention(q, k, v, policy=RoundingPolicy.kernel("bf16"), tile=(64, 32))
    assert len(taken) == 4  # two heads, two tiles
    for options in ({"causal": "top_left"}, {"softcap": 5.0}, {"algorithm": "fa1"}, {"probability_scale": 256.0}):
        flash_attention(q, k, v, policy=RoundingPolicy.kernel("bf16"), tile=(64, 32), **options)
    for policy in (
        RoundingPolicy.uniform("bf16"),
        RoundingPolicy.kernel("bf16").replace(probabilities="bf16:stochastic"),
    ):
        flash_attention(q, k, v, policy=policy, tile=(64, 32), generator=torch.Generator())
    assert len(taken) == 4
