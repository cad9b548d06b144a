"""Cases that people met in real attention code, cut down to a small input, with the value that is right."""

import math

import pytest
import torch

from fa_study.attention import attention_gradients, baseline_attention, flash_attention, golden_attention
from fa_study.rounding import RoundingPolicy

FP32, FP64 = RoundingPolicy.uniform("fp32"), RoundingPolicy.uniform("fp64")
TILES = [(1, 1), (2, 3), (64, 64)]


def ways(policy):
    """Every algorithm as a function of (q, k, v, **features)."""

    def tiled(algorithm, tile):
        return lambda *x, **o: flash_attention(*x, policy=policy, algorithm=algorithm, tile=tile, **o)

    yield lambda *x, **o: baseline_attention(*x, policy=policy, **o)
    for algorithm in ("fa1", "fa2", "fa4"):
        for tile in TILES:
            yield tiled(algorithm, tile)


def logits(values):
    """q, k with q k^T = values for one row (scale 1), in float32."""
    return torch.ones(1, 1, 1, 1), torch.tensor(values, dtype=torch.float32).reshape(1, 1, -1, 1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_a1_rows_with_no_key_are_zero_with_finite_gradients():
    q, k, v, dout = (torch.randn(1, 1, 8, 8) for _ in range(4))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:] = False
    want = golden_attention(q, k, v, mask=mask).out
    for way in ways(FP32):
        out = way(q, k, v, mask=mask).out
        assert (out[:, :, 4:] == 0).all()
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    for algorithm in ("baseline", "fa1", "fa2", "fa4"):
        grads = attention_gradients(q, k, v, dout, policy=FP32, algorithm=algorithm, mask=mask, tile=(3, 2))
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][:, :, 4:] == 0).all() and grads[0][:, :, :4].abs().min() > 0


def test_a2_a_finite_bias_is_no_mask():
    q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
    bias = torch.zeros(3, 3)
    bias[0] = torch.finfo(torch.float32).min
    hidden = torch.zeros(3, 3)
    hidden[0] = -math.inf
    for way in ways(FP32):
        out = way(q, k, v, bias=bias).out
        torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0))
        masked = way(q, k, v, bias=hidden)
        assert (masked.out[0, 0, 0] == 0).all() and masked.lse[0, 0, 0] == -math.inf


def test_a3_one_live_logit_among_many():
    q, k = logits([0.0] * 100_000)
    v = torch.randn(1, 1, 100_000, 2)
    bias = torch.full((1, 100_000), -math.inf)
    bias[0, 50_000] = 10.0
    for algorithm in ("fa1", "fa2", "fa4"):
        result = flash_attention(q, k, v, policy=FP32, algorithm=algorithm, tile=(1, 1000), bias=bias, scale=1.0)
        assert result.lse.item() == 10.0
        assert torch.equal(result.out[0, 0, 0], v[0, 0, 50_000])
        assert result.counts["tiles"] == 1 and result.counts["rescalings"] == 0


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a4_masked_means_absent(poison, value):
    x = {name: torch.randn(1, 1, 2, 4) for name in "qkv"}
    clean = {name: t.clone() for name, t in x.items()}
    x[poison][0, 0, 1] = value
    mask = torch.tensor([[True, False], [True, True]])
    dout = torch.randn(1, 1, 2, 4)
    for way in ways(FP32):
        out = way(x["q"], x["k"], x["v"], mask=mask).out
        want = way(clean["q"], clean["k"], clean["v"], mask=mask).out
        assert torch.equal(out[0, 0, 0], want[0, 0, 0])
        # Row 1 sees the key: an infinite score of either sign may leave a finite row, NaN may not.
        if math.isnan(value) or poison == "v":
            assert not out[0, 0, 1].isfinite().any()
    if poison == "v" or math.isnan(value):
        assert not golden_attention(x["q"], x["k"], x["v"], mask=mask).out[0, 0, 1].isfinite().any()
    assert golden_attention(x["q"], x["k"], x["v"], mask=mask).out[0, 0, 0].isfinite().all()
    for algorithm in ("baseline", "fa2"):
        dq, _, _ = attention_gradients(x["q"], x["k"], x["v"], dout, policy=FP32, algorithm=algorithm, mask=mask)
        assert dq[0, 0, 0].isfinite().all()


def test_a5_nan_queries_give_nan():
    q, k, v = torch.full((1, 1, 3, 4), math.nan), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    for way in ways(FP32):
        result = way(q, k, v)
        assert result.out.isnan().all() and result.lse.isnan().all()
        assert result.counts["nonfinite"] == 12


def test_a6_masked_keys_have_no_weight_beside_hugely_negative_scores():
    q, v = torch.full((1, 1, 4, 1), 1.0), torch.eye(4).reshape(1, 1, 4, 4)
    k = torch.tensor([-2e6, -2e6 + 1, -2e6 + 2, 5.0]).reshape(1, 1, 4, 1)
    for way in ways(FP32):
        out = way(q, k, v, causal="top_left", scale=1.0).out[0, 0]
        assert (out.triu(1) == 0).all()
        torch.testing.assert_close(out.sum(-1), torch.ones(4))


def test_a7_scores_rounded_before_the_scale_overflow_in_fp16():
    x = torch.full((1, 1, 2, 64), 200.0, dtype=torch.float16)
    result = baseline_attention(x, x, x, policy=RoundingPolicy.eager("fp16"))
    assert result.out.isnan().all()
    assert result.counts["overflows"]["scores"] == 4 and result.counts["nonfinite"] == 128
    for way in ways(RoundingPolicy.kernel("fp16")):
        assert (way(x, x, x).out == 200).all()


def test_a8_softcap_of_large_scores():
    values = [1.0, 100.0, 1000.0, 3000.0, 5000.0, -10000.0]
    capped = [0.9999, 48.2014, 50.0, 50.0, 50.0, -50.0]
    for value, want in zip(values, capped):
        q, k = logits([value])
        for way in ways(FP32):
            result = way(q, k, torch.ones(1, 1, 1, 1), softcap=50.0, scale=1.0)
            assert result.lse.item() == pytest.approx(want, abs=1e-4)


def test_a9_scale_comes_before_the_cap():
    q, k = logits([100.0])
    for way in ways(FP64):
        lse = way(q, k, torch.ones(1, 1, 1, 1), softcap=20.0, scale=0.1).lse.item()
        assert lse == pytest.approx(20 * math.tanh(0.5), abs=1e-12)


@pytest.mark.parametrize("L, S", [(2, 5), (5, 2)])
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_a10_both_causal_alignments(L, S, causal):
    q, k, v = torch.randn(1, 1, L, 4), torch.randn(1, 1, S, 4), torch.randn(1, 1, S, 4)
    offset = 0 if causal == "top_left" else S - L
    for way in ways(FP64):
        result = way(q, k, v, causal=causal)
        for i in range(L):
            seen = max(0, min(S, i + offset + 1))
            if seen == 0:
                assert (result.out[0, 0, i] == 0).all() and result.lse[0, 0, i] == -math.inf
            else:
                want = golden_attention(q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen])
                torch.testing.assert_close(result.out[0, 0, i], want.out[0, 0, 0], rtol=1e-13, atol=1e-14)
    if causal == "bottom_right" and L == 5:
        assert (result.lse[0, 0, :3] == -math.inf).all() and (result.lse[0, 0, 3:] > -math.inf).all()


def test_a11_empty_sizes():
    for B, L, S in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q, k, v, dout = (
            torch.randn(B, 4, L, 8),
            torch.randn(B, 2, S, 8),
            torch.randn(B, 2, S, 6),
            torch.randn(B, 4, L, 6),
        )
        for way in (*ways(FP32), lambda *x: golden_attention(*x)):
            result = way(q, k, v)
            assert result.out.shape == (B, 4, L, 6) and result.lse.shape == (B, 4, L)
            assert (result.out == 0).all() and (result.lse == -math.inf).all()
        shapes = [g.shape for g in attention_gradients(q, k, v, dout, policy=FP32)]
        assert shapes == [q.shape, k.shape, v.shape]


def test_a12_lse_of_a_row_with_no_key():
    q = torch.randn(1, 1, 2, 4)
    mask = torch.tensor([[True, True], [False, False]])
    for way in ways(FP32):
        assert way(q, q, q, mask=mask).lse[0, 0, 1] == -math.inf
    assert golden_attention(q, q, q, mask=mask).lse[0, 0, 1] == -math.inf


def test_a13_lse_of_large_logits():
    q, k = logits([1000.0, 1000.0])
    for way in ways(FP32):
        assert way(q, k, k, scale=1.0).lse.item() == pytest.approx(1000.6931, abs=1e-4)


def test_a14_grouped_heads():
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    for way in ways(FP64):
        out = way(q, k, v).out
        for j in range(4):
            alone = golden_attention(q[:, j : j + 1], k[:, j // 2, None], v[:, j // 2, None]).out
            torch.testing.assert_close(out[:, j : j + 1], alone, rtol=1e-13, atol=1e-14)
    with pytest.raises(ValueError, match=r"3 query heads.*2 key/value heads"):
        flash_attention(q[:, :3], k, v, policy=FP32)


def test_a15_a_large_negative_fp16_bias_stays_finite_in_fp32_scores():
    q, k = logits([-20.0, -20.0])
    bias = torch.full((1, 2), -65504.0, dtype=torch.float16)
    for way in ways(RoundingPolicy.kernel("fp16")):
        result = way(q, k, torch.ones(1, 1, 2, 1), bias=bias, scale=1.0)
        assert (result.out == 1).all() and result.lse.item() == pytest.approx(-65524 + math.log(2), abs=0.01)


def test_a16_left_padding():
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    mask[0, :, :, :3] = False
    mask[0, :, :3] = False
    for way in ways(FP32):
        out = way(q, k, v, mask=mask, causal="bottom_right").out
        assert (out[0, :, :3] == 0).all()
        alone = way(*(x[:1, :, 3:] for x in (q, k, v)), causal="bottom_right").out
        torch.testing.assert_close(out[:1, :, 3:], alone, rtol=1e-6, atol=1e-6)


def test_a17_right_padding_changes_no_bit():
    q, k, v = (torch.randn(1, 2, 40, 32).bfloat16() for _ in range(3))
    mask = torch.arange(40) < 32
    for policy in (RoundingPolicy.uniform("bf16"), RoundingPolicy.kernel("bf16"), RoundingPolicy.eager("bf16")):
        for way in ways(policy):
            padded, short = way(q, k, v, mask=mask).out, way(*(x[:, :, :32] for x in (q, k, v))).out
            assert torch.equal(padded[:, :, :32], short)


def test_a18_flash_and_eager_are_each_compared_with_the_truth():
    q, k, v = (torch.randn(1, 32, 768, 32).half() for _ in range(3))
    golden = golden_attention(q, k, v).out
    eager = baseline_attention(q, k, v, policy=RoundingPolicy.eager("fp16")).out
    flash = flash_attention(q, k, v, policy=RoundingPolicy.kernel("fp16"), tile=(128, 128)).out
    assert (flash - golden).abs().max() <= 2 * (eager - golden).abs().max()


def test_a19_the_truth_starts_from_the_rounded_inputs():
    q, k, v = (torch.randn(1, 1, 64, 32).half() for _ in range(3))
    policy = RoundingPolicy.uniform("fp64").replace(inputs="bf16")
    rounded = [x.bfloat16() for x in (q, k, v)]
    out = flash_attention(q, k, v, policy=policy).out
    torch.testing.assert_close(out, golden_attention(*rounded).out, rtol=1e-13, atol=1e-14)
    assert (out - golden_attention(q, k, v).out).abs().max() > 1e-3


def test_a20_equal_maxima_bias_the_accumulator_and_the_shift_removes_it():
    """A row's maximum twice, so P = 1 exactly for both, and V of one sign.

    The sum of the two V lies half way between two BF16 numbers; what the other key adds, always of the same sign, turns
    every such tie in one direction. With the shift, P is no power of two and there are no ties.
    """
    q = (3 + 2 * torch.rand(1, 1, 256, 1)).bfloat16()
    k = torch.tensor([1.0, 1.0, -0.5]).reshape(1, 1, 3, 1).bfloat16()
    even = torch.randint(0, 32, (64,)) * 2
    v = -torch.stack([2 + even / 64, 2 + (even + 1) / 64, torch.full((64,), 0.5)]).reshape(1, 1, 3, 64).bfloat16()
    policy = RoundingPolicy(inputs="bf16", probabilities="bf16", accumulator="bf16")
    golden = golden_attention(q, k, v, scale=1.0).out
    plain, shifted = (
        (flash_attention(q, k, v, policy=policy, scale=1.0, shift=shift).out - golden).mean().item()
        for shift in (None, stable_shift)
    )
    half_step = 2.0**-6 / 2  # of the sum, which lies in [4, 8), after division by the row sum 2
    assert plain == pytest.approx(-half_step, rel=0.15)
    assert abs(shifted) < abs(plain) / 10


def stable_shift(scores, running_max, beta=2.0):
    """arXiv 2510.04212: where the tile's maximum repeats, subtract beta times it (0 if negative)."""
    top = scores.amax(-1, keepdim=True)
    repeated = (scores == top).sum(-1, keepdim=True) > 1
    moved = torch.where(top > 0, beta * top, torch.zeros_like(top))
    return torch.where(repeated, torch.maximum(running_max, moved), running_max)


def test_a21_thirty_repeats_and_two_thread_counts_are_equal():
    q, k, v = (torch.randn(1, 2, 70, 32).bfloat16() for _ in range(3))
    before = torch.get_num_threads()
    try:
        for policy in (RoundingPolicy.uniform("bf16"), RoundingPolicy.kernel("bf16")):
            outs = []
            for repeat in range(30):
                torch.set_num_threads(1 + repeat % 2)
                outs.append(flash_attention(q, k, v, policy=policy, tile=(16, 32)).out)
            assert all(torch.equal(out, outs[0]) for out in outs)
    finally:
        torch.set_num_threads(before)


def test_a22_a_bf16_bias_is_used_as_it_is():
    S = 4096
    q, k, v = torch.randn(1, 1, 4, 16), torch.randn(1, 1, S, 16), torch.randn(1, 1, S, 8)
    bias = (torch.randn(4, S) * 5).bfloat16()
    wide = flash_attention(q, k, v, policy=FP32, bias=bias).out
    assert torch.equal(wide, flash_attention(q, k, v, policy=FP32, bias=bias.double()).out)
    torch.testing.assert_close(wide.double(), golden_attention(q, k, v, bias=bias).out, rtol=1e-5, atol=1e-6)
    # The sum with the scores is rounded where the policy says so, and then only.
    coarse = flash_attention(q, k, v, policy=FP32.replace(scores="bf16"), bias=bias).out
    assert (coarse - wide).abs().max() > 1e-4
