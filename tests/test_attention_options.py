"""Options at their limits, options that make no sense, and merging of whatever results there are."""

import math

import numpy as np
import pytest
import torch

from fa_study.attention import (
    AttentionResult,
    attention_gradients,
    baseline_attention,
    flash_attention,
    golden_attention,
    merge_attention,
)
from fa_study.attention.reference import reference_attention
from fa_study.rounding import RoundingPolicy

FP32 = RoundingPolicy.uniform("fp32")


def problem(L=6, S=20, D=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, d, generator=generator).to(dtype) for n, d in ((L, D), (S, D), (S, 5))]


# The rescaling threshold


def test_an_infinite_threshold_keeps_the_first_maximum():
    q, k, v = problem()
    got = flash_attention(q, k, v, policy=FP32, algorithm="fa4", tile=(4, 4), rescale_threshold=math.inf)
    torch.testing.assert_close(got.out.double(), golden_attention(q, k, v).out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.lse.double(), golden_attention(q, k, v).lse, rtol=1e-5, atol=1e-6)
    assert got.counts["rescalings"] == 0


def test_the_first_maximum_is_that_of_the_first_live_key():
    """Rows whose first tiles are masked, against the slow twin."""
    q, k, v = problem()
    live = torch.arange(20) >= torch.tensor([0, 3, 4, 9, 17, 20])[:, None]
    got = flash_attention(q, k, v, policy=FP32, algorithm="fa4", tile=(4, 4), mask=live, rescale_threshold=math.inf)
    for h in range(2):
        out, lse = reference_attention(q[0, h], k[0, h], v[0, h], FP32, 4, "fa4", live=live, threshold=math.inf)
        torch.testing.assert_close(got.out[0, h], out, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got.lse[0, h], lse, rtol=1e-6, atol=1e-6)
    golden = golden_attention(q, k, v, mask=live)
    torch.testing.assert_close(got.out.double(), golden.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.lse.double(), golden.lse, rtol=1e-5, atol=1e-6)


# Options that make no sense


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("rescale_threshold", [math.nan, -1.0, -math.inf, "a", None]),
        ("probability_scale", [0, -1.0, math.inf, math.nan, "a", None, 1e300, 1e-60, 10**400]),
        ("softcap", [math.inf, math.nan, -1.0, "3", True, 1e300, 1e-60]),
        ("scale", ["x", math.inf, math.nan, (1,), True, 10**400]),
        ("tile", [(True, True), (np.bool_(True), 8), (8.0, 8), "88"]),
    ],
)
def test_an_option_without_meaning_is_refused(option, values):
    q, k, v = problem()
    calls = [lambda **o: flash_attention(q, k, v, policy=FP32, algorithm="fa4", **o)]
    if option in ("scale", "softcap"):
        calls += [lambda **o: baseline_attention(q, k, v, policy=FP32, **o), lambda **o: golden_attention(q, k, v, **o)]
    for call in calls:
        for value in values:
            with pytest.raises(ValueError, match=f"^{option}=.*: use ") as error:
                call(**{option: value})
            assert "\n" not in str(error.value)


def test_numbers_of_numpy_are_numbers():
    q, k, v = problem()
    want = flash_attention(q, k, v, policy=FP32, tile=(8, 8), scale=0.5, softcap=4.0)
    got = flash_attention(
        q, k, v, policy=FP32, tile=(np.int64(8), 8), scale=np.float32(0.5), softcap=np.float64(4), probability_scale=1
    )
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_heads_of_size_zero_average_the_values():
    q, k, v = problem(D=0)
    mean = v.double().mean(2, keepdim=True).expand(-1, -1, 6, -1)
    results = [
        golden_attention(q, k, v),
        baseline_attention(q, k, v, policy=FP32),
        flash_attention(q, k, v, policy=FP32),
    ]
    for result in results:
        torch.testing.assert_close(result.out.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result.lse.double(), torch.full((1, 2, 6), math.log(20)).double())


def test_the_gradients_name_every_algorithm():
    q, k, v = problem()
    with pytest.raises(ValueError, match="'foo' is unknown: use one of baseline, fa1, fa2, fa4"):
        attention_gradients(q, k, v, torch.ones(1, 2, 6, 5), policy=FP32, algorithm="foo")


@pytest.mark.parametrize("dout", [3, None, np.ones((1, 2, 6, 5))])
def test_a_gradient_that_is_no_tensor_is_refused(dout):
    with pytest.raises(ValueError, match=r"dout has to be a floating-point tensor .*\(1, 2, 6, 5\), got "):
        attention_gradients(*problem(), dout, policy=FP32)


# Merging


def halves(attend, x):
    q, k, v = x
    return [attend(q, k[:, :, :7], v[:, :, :7]), attend(q, k[:, :, 7:], v[:, :, 7:])]


def test_golden_results_merge_and_so_do_bare_ones():
    x = problem()
    whole, parts = golden_attention(*x), halves(golden_attention, x)
    merged = merge_attention(parts)
    torch.testing.assert_close(merged.out, whole.out, rtol=1e-13, atol=1e-14)
    assert torch.equal(merged.max_scores, whole.max_scores) and merged.counts == {"nonfinite": 0}
    bare = merge_attention([AttentionResult(r.out, r.lse) for r in parts])
    assert torch.equal(bare.out, merged.out) and torch.equal(bare.lse, merged.lse)
    assert bare.max_scores is None and bare.counts == {"nonfinite": 0}
    # A count that one part lacks is unknown for the whole.
    assert merge_attention([parts[0], flash_attention(*x, policy=FP32)]).counts == {"nonfinite": 0}


def test_a_generator_merges_like_a_list():
    parts = halves(lambda *x: flash_attention(*x, policy=FP32), problem())
    listed, streamed = merge_attention(parts), merge_attention(r for r in parts)
    assert torch.equal(listed.out, streamed.out) and torch.equal(listed.lse, streamed.lse)
    assert listed.counts == streamed.counts and listed.counts["tiles"] == 4
    with pytest.raises(ValueError, match="at least one"):
        merge_attention(r for r in [])


@pytest.mark.parametrize("swapped", [False, True])
def test_parts_of_different_dtypes_merge_in_the_widest(swapped):
    x = problem()
    golden, (_, second) = golden_attention(*x), halves(golden_attention, x)
    q, k, v = x
    first = flash_attention(q, k[:, :, :7], v[:, :, :7], policy=FP32)
    merged = merge_attention([second, first] if swapped else [first, second])
    assert merged.out.dtype == merged.lse.dtype == merged.max_scores.dtype == torch.float64
    torch.testing.assert_close(merged.out, golden.out, rtol=1e-5, atol=1e-6)
    narrow = [AttentionResult(first.out.to(t), first.lse.to(t)) for t in (torch.bfloat16, torch.float16)]
    merged = merge_attention(narrow)
    assert merged.out.dtype == merged.lse.dtype == torch.float32
    torch.testing.assert_close(merged.out, first.out, rtol=1e-2, atol=1e-2)
