"""Published algorithms, each in a few lines from the same pieces."""

import math

import pytest
import torch

from fa_study.attention import baseline_attention, flash_attention, golden_attention, merge_attention
from fa_study.quantize import hadamard, quantize
from fa_study.rounding import Accumulation, RoundingPolicy

KERNEL = RoundingPolicy.kernel("bf16")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def problem(L=256, S=256, D=64, dtype=torch.bfloat16):
    return [torch.randn(1, 2, n, D).to(dtype) for n in (L, S, S)]


def rms(result, golden):
    return (result.out.double() - golden.out).square().mean().sqrt().item()


def test_flash_attention_1_errs_more_with_more_tiles():
    q, k, v = problem()
    golden, policy = golden_attention(q, k, v), RoundingPolicy.uniform("bf16")
    many, few = (
        rms(flash_attention(q, k, v, policy=policy, algorithm="fa1", tile=(16, Bc)), golden) for Bc in (16, 256)
    )
    assert many > 1.2 * few


def test_flash_attention_2():
    q, k, v = problem()
    flash = flash_attention(q, k, v, policy=KERNEL, tile=(128, 64), key_order="reverse", exp="exp2_fma")
    eager = baseline_attention(q, k, v, policy=RoundingPolicy.eager("bf16"))
    assert rms(flash, golden_attention(q, k, v)) < rms(eager, golden_attention(q, k, v))


def flash_attention_3_fp8(q, k, v, spread=True):
    """FlashAttention 3 in FP8: block scales, incoherent processing, P times 2^8 in E4M3, products promoted."""
    if spread:
        q, k = hadamard(q.float()), hadamard(k.float())
    q, k, v = (quantize(x, "fp8_e4m3", block=(128, None)) for x in (q, k, v))
    policy = RoundingPolicy(
        probabilities="fp8_e4m3",
        output="bf16",
        products=Accumulation("e8m13:toward_zero", every=32, promote=128),
    )
    return flash_attention(q, k, v, policy=policy, tile=(128, 128), probability_scale=2.0**8)


def test_flash_attention_3_fp8():
    q, k, v = (torch.randn(1, 1, 256, 64) for _ in range(3))
    for x in (q, k, v):
        x += 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)
    golden = golden_attention(q, k, v)
    plain = rms(flash_attention_3_fp8(q, k, v, spread=False), golden)
    assert rms(flash_attention_3_fp8(q, k, v), golden) < 1.1 * plain
    assert 1e-3 < plain < 5e-2


def test_fp8_probabilities_need_their_factor():
    """One key far above 500 others: their P = exp(-6) is subnormal in E4M3, and 2^8 P is not."""
    q, v = torch.ones(1, 1, 16, 1), torch.rand(1, 1, 501, 8)
    k = 0.3 * torch.rand(1, 1, 501, 1)
    k[:, :, 0] = 6.0
    golden, policy = golden_attention(q, k, v), RoundingPolicy(probabilities="fp8_e4m3")
    lost, kept = (rms(flash_attention(q, k, v, policy=policy, probability_scale=c), golden) for c in (1.0, 2.0**8))
    assert kept < lost / 5


def polynomial_exp(x):
    """FlashAttention 4's exp2 of part of the elements: a polynomial of degree 3 for the fraction, here for all."""
    y = x * math.log2(math.e)
    whole = y.floor().clamp(min=-126)
    f = y - whole
    p = 1 + f * (0.695146143436431884765625 + f * (0.227564394474029541015625 + f * 0.077119089663028717041015625))
    return (p * torch.exp2(whole)).masked_fill(x == -math.inf, 0.0)


def test_flash_attention_4():
    q, k, v = problem()
    golden = golden_attention(q, k, v)
    lazy = flash_attention(q, k, v, policy=KERNEL, algorithm="fa4", exp=polynomial_exp, tile=(128, 64))
    eager = flash_attention(q, k, v, policy=KERNEL, algorithm="fa2", tile=(128, 64))
    assert lazy.counts["rescalings"] < eager.counts["rescalings"] / 100
    assert rms(lazy, golden) < 1.5 * rms(eager, golden)


def test_flash_decoding_merges_splits_of_the_keys():
    q, k, v = problem(L=1, S=1000)
    partial = KERNEL.replace(output="fp32")
    splits = [
        flash_attention(q, k[..., i : i + 256, :], v[..., i : i + 256, :], policy=partial) for i in range(0, 1000, 256)
    ]
    merged, whole = merge_attention(splits), flash_attention(q, k, v, policy=partial)
    assert merged.out.dtype == torch.float32
    golden = golden_attention(q, k, v)
    assert rms(merged, golden) < 1.2 * rms(whole, golden) + 1e-7
    torch.testing.assert_close(merged.lse.double(), golden.lse, rtol=1e-6, atol=1e-6)


def test_pasa_keeps_fp16_scores_finite():
    """PASA: the mean of each key tile is taken off, so that FP16 scores of biased keys do not overflow."""
    q, k, v = problem(dtype=torch.float32)
    q, k = q + 30, k + 60  # one bias in every key: scores of 64 * 30 * 60 before the scale
    policy = RoundingPolicy.kernel("fp16").replace(scores="fp16")
    plain = flash_attention(q, k, v, policy=policy)
    assert plain.counts["overflows"]["scores"] > 0 and plain.counts["nonfinite"] > 0
    pasa = flash_attention(q, k, v, policy=policy, key_offset=lambda tile: tile.mean(-2, keepdim=True))
    golden = golden_attention(q.half(), k.half(), v.half())
    assert pasa.counts["overflows"]["scores"] == 0
    assert (pasa.out - golden.out).abs().max() < 0.1
    exact = flash_attention(
        q, k, v, policy=RoundingPolicy.uniform("fp64"), key_offset=lambda tile: tile.mean(-2, keepdim=True)
    )
    truth = golden_attention(q, k, v)
    torch.testing.assert_close(exact.out, truth.out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(exact.lse, truth.lse, rtol=1e-12, atol=0)


def test_sage_attention_smooths_keys_for_int8():
    """SageAttention: Q and K in INT8 with block scales, K less its mean, which the softmax does not see."""
    q, k, v = problem(dtype=torch.float32)
    k = k + 8 * torch.randn(1, 2, 1, 64)
    policy = RoundingPolicy(probabilities="fp16", accumulator="fp16")
    golden = golden_attention(q, k, v)

    def sage(keys):
        return flash_attention(
            quantize(q, "int8", block=(128, None)), quantize(keys, "int8", block=(64, None)), v, policy=policy
        )

    smooth = k - k.mean(-2, keepdim=True)
    assert rms(sage(smooth), golden) < rms(sage(k), golden) / 3
    # As a key offset, the smoothing is undone in the log-sum-exp as well.
    mean = k.mean(-2, keepdim=True)
    offset = flash_attention(q, k, v, policy=policy, key_offset=lambda tile: mean)
    torch.testing.assert_close(offset.lse.double(), golden.lse, rtol=1e-5, atol=1e-4)


def test_stable_shift_changes_p_where_the_maximum_repeats():
    def shift(scores, running_max, beta=7.0):
        top = scores.amax(-1, keepdim=True)
        repeated = (scores == top).sum(-1, keepdim=True) > 1
        return torch.where(repeated, torch.maximum(running_max, (beta * top).clamp(min=0)), running_max)

    q = torch.tensor([[1.0], [-1.0]]).reshape(1, 1, 2, 1)
    k, v = torch.tensor([2.0, 2.0, 1.0]).reshape(1, 1, 3, 1), torch.randn(1, 1, 3, 4)
    golden = golden_attention(q, k, v, scale=1.0)
    shifted = flash_attention(q, k, v, policy=RoundingPolicy.uniform("fp64"), shift=shift, scale=1.0)
    torch.testing.assert_close(shifted.out, golden.out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(shifted.lse, golden.lse, rtol=1e-13, atol=1e-13)
    assert torch.equal(shifted.max_scores, golden.max_scores)
    # exp(m - 7 m) underflows FP32 once m exceeds 104 / 6 = 17.3, and is subnormal from 14.6 on.
    lost = flash_attention(
        q * 20, k[:, :, :2], v[:, :, :2], policy=RoundingPolicy.uniform("fp32"), shift=shift, scale=1.0
    )
    assert lost.out[0, 0, 0].isnan().all() and lost.counts["nonfinite"] == 4


def test_deepseek_promotion_of_fourteen_bit_sums():
    q, k, v = (torch.rand(1, 1, 8, 1024), torch.rand(1, 1, 64, 1024), torch.rand(1, 1, 64, 16))
    golden = golden_attention(q, k, v, scale=1.0)
    errors = {}
    for promote in (None, 128):
        sums = Accumulation("e8m13:toward_zero", every=32, promote=promote)
        result = flash_attention(q, k, v, policy=RoundingPolicy(products=sums), scale=1.0)
        errors[promote] = (result.lse - golden.lse).abs().mean().item()
    assert errors[128] < errors[None] / 3
