"""The exponentials against float64, against arithmetic written out, and against PyTorch's kernel that uses one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from float_checks import assert_same
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_study.attention.exponentials import EXPONENTIALS, exact_exp, fexp_u20, shifted_exp
from fa_study.rounding import parse_rounding

LIMITS = (-87.3365478515625, 88.72283935546875)


def arguments(n: int, low: float, high: float) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).uniform(low, high, n).astype(np.float32))


def fast_exp_written_out(x: np.ndarray) -> np.ndarray:
    """The published steps, each fused multiply-add exact in float64 and then rounded once to float32."""

    def fma(a, b, c):
        return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)

    c0, c1, c2, c3 = map(np.float32, (0.00010703434948458272, 0.30354260500649682, -0.22433836478672356, -0.07920424))
    s = x * np.float32(math.log2(math.e))
    f = s - np.floor(s)
    s = s - fma(f, fma(f, fma(f, c3, c2), c1), c0)
    bits = fma(np.float32(2**23), s, np.float32(127 * 2**23))
    bits = np.where((x >= LIMITS[0]) & (x <= LIMITS[1]), bits, 0).astype(np.int32)
    return np.where(x > LIMITS[1], np.float32(np.inf), bits.view(np.float32))


@pytest.mark.parametrize(("low", "high"), [(-1, 0), (-90, 90), (-87.34, -87.33), (88.7, 88.75), (-1e-6, 1e-6)])
def test_fexp_u20_equals_its_steps_written_out(low, high):
    x = arguments(300_000, low, high)
    assert_same(fexp_u20(x), torch.from_numpy(fast_exp_written_out(x.numpy())))


def test_fexp_u20_limits_and_accuracy():
    inf, nan = torch.inf, torch.nan
    edges = [-inf, -1e30, np.nextafter(np.float32(LIMITS[0]), np.float32(-100)), 88.73, 1e38, inf, nan]
    assert_same(fexp_u20(torch.tensor(edges)), torch.tensor([0.0, 0.0, 0.0, inf, inf, inf, nan]))
    assert (fexp_u20(torch.tensor(LIMITS)) > 0).all() and fexp_u20(torch.tensor(LIMITS)).isfinite().all()
    x = arguments(300_000, -87, 88)
    error = (fexp_u20(x).double() / torch.exp(x.double()) - 1).abs().max()
    assert 1e-4 < error < 1.2e-4
    assert_same(fexp_u20(x.double()), fexp_u20(x).double())


def flash_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exp: str) -> torch.Tensor:
    """PyTorch's CPU flash kernel for one tile of keys, with the emulated exponential."""
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    p = shifted_exp(scores, scores.amax(-1, keepdim=True), exp)
    out = p.to(q.dtype).float() @ v.float()
    return (out * (1 / p.sum(-1, keepdim=True))).to(q.dtype)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the kernel uses it with AVX2 and AVX-512 only",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fexp_u20_is_what_the_cpu_flash_kernel_computes(dtype):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2, 512, 64, generator=generator).to(dtype) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        kernel = torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def agreement(exp: str) -> float:
        return (flash_by_hand(q, k, v, exp) == kernel).double().mean().item()

    assert agreement("fexp_u20") >= 0.999
    assert agreement("exact") < 0.99


@pytest.mark.parametrize(("low", "high"), [(-1, 0), (-87, 88), (-88, -86), (-110, -80)])
def test_exact_exp_is_within_one_unit_in_the_last_place(low, high):
    x = arguments(200_000, low, high)
    got, true = exact_exp(x).double(), torch.exp(x.double())
    unit = torch.exp2(torch.frexp(true)[1].double() - 24).clamp(min=2.0**-149)
    assert ((got - true).abs() <= unit).all()


def test_exact_exp_is_torch_exp_but_for_subnormal_results():
    inf, nan = torch.inf, torch.nan
    x = torch.cat([arguments(100_000, -87, 80), torch.tensor([-0.0, inf, 89.0, nan])])
    with_tails = torch.cat([x, torch.tensor([-inf, -88.0, -104.5, -3e38])])
    assert_same(exact_exp(x), torch.exp(x))
    assert_same(exact_exp(with_tails)[: len(x)], torch.exp(x))
    assert_same(exact_exp(with_tails)[len(x) :], torch.exp(with_tails[len(x) :].double()).float())
    assert_same(exact_exp(x.double()), torch.exp(x.double()))
    assert exact_exp(x[:0]).numel() == 0


@pytest.mark.parametrize("exp", EXPONENTIALS)
def test_an_element_has_the_same_bits_wherever_it_stands(exp):
    scores, maximum = arguments(64 * 129, -100, 0).view(64, 129), arguments(64, 0, 5).view(64, 1)
    whole = shifted_exp(scores, maximum, exp)
    assert_same(shifted_exp(scores.mT, maximum.mT, exp).mT, whole)
    assert_same(shifted_exp(scores[3:6, 5:], maximum[3:6], exp), whole[3:6, 5:])
    assert_same(shifted_exp(scores[:, ::2], maximum, exp), whole[:, ::2])
    assert_same(shifted_exp(scores[7:8, 9:10], maximum[7:8], exp), whole[7:8, 9:10])


@pytest.mark.parametrize("scale", [1.0, 0.125, 1 / math.sqrt(80)])
def test_exp2_fma_rounds_the_scaled_maximum_and_then_once(scale):
    scores, maximum = arguments(100_000, -300, 300).view(100, 1000), torch.full((100, 1), 300.7)
    c = np.float32(scale * math.log2(math.e))
    scaled_maximum = np.float32(maximum.numpy() * c).astype(np.float64)
    exponent = (scores.double().numpy() * np.float64(c) - scaled_maximum).astype(np.float32)
    expected = torch.from_numpy(np.exp2(exponent.astype(np.float64)).astype(np.float32))
    got = shifted_exp(scores, maximum, "exp2_fma", scale=scale)
    assert (got == expected).double().mean() > 0.99999
    torch.testing.assert_close(got, expected, rtol=2.0**-23, atol=2.0**-149)
    unfused = torch.exp2((scores * float(c) - maximum * float(c)).double()).float()
    assert (got != unfused).any()
    # In a wider carrier, rounding to FP32 after each operation is the same computation.
    wide = shifted_exp(scores.double(), maximum.double(), "exp2_fma", scale=scale, rounding=parse_rounding("fp32"))
    assert_same(wide, got.double())


@pytest.mark.parametrize("exp", [*EXPONENTIALS, torch.exp])
def test_every_operation_is_rounded(exp):
    scores, maximum = arguments(10_000, -20, 0).view(100, 100), torch.full((100, 1), 0.3)
    bf16 = parse_rounding("bf16")
    got = shifted_exp(scores, maximum, exp, rounding=bf16)
    assert_same(bf16(got), got)
    if exp != "exp2_fma":
        function = fexp_u20 if exp == "fexp_u20" else torch.exp
        assert_same(got, bf16(function(bf16(scores - maximum))))
        scaled = shifted_exp(scores, maximum, exp, rounding=bf16, scale=0.3)
        assert_same(scaled, bf16(function(bf16(bf16(scores - maximum) * 0.3))))


@pytest.mark.parametrize("exp", [*EXPONENTIALS, lambda x: 1 + x])
def test_the_gradient_is_the_value(exp):
    scores = arguments(30, -3, 0).view(5, 6).requires_grad_()
    maximum = torch.zeros(5, 1, requires_grad=True)
    value = shifted_exp(scores, maximum, exp, scale=0.5)
    value.sum().backward()
    torch.testing.assert_close(scores.grad, 0.5 * value.detach())
    torch.testing.assert_close(maximum.grad, -0.5 * value.detach().sum(-1, keepdim=True))


def test_an_unknown_exponential_is_explained():
    with pytest.raises(ValueError, match="exp='exp2' is unknown: use one of exact, exp2_fma, fexp_u20, or a callable"):
        shifted_exp(torch.ones(1), torch.ones(1), "exp2")
