"""Block scales and the Hadamard transform."""

from __future__ import annotations

import math

import pytest
import torch
from float_checks import assert_same

from fa_study.formats import FP8_E4M3, round_to
from fa_study.quantize import hadamard, quantize


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantize_block(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """One block, written out."""
    largest = 127.0 if fmt == "int8" else {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[fmt]
    scale = x.abs().max() / largest
    return ((x / scale).round() if fmt == "int8" else round_to(x / scale, fmt)) * scale


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [None, 32, (16, None), (None, 24), (7, 10), (128, 128)], ids=str)
def test_every_block_has_its_own_scale(fmt, block, dtype):
    x = (normal(2, 3, 50, 40) * torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    got = quantize(x, fmt, block=block)
    if block is None:
        assert_same(got, quantize_block(x, fmt))
        return
    rows, columns = (1, block) if isinstance(block, int) else (block[0] or 50, block[1] or 40)
    for i in range(2):
        for j in range(3):
            for r in range(0, 50, rows):
                for c in range(0, 40, columns):
                    part = (i, j, slice(r, r + rows), slice(c, c + columns))
                    assert_same(got[part], quantize_block(x[part], fmt))


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_the_largest_value_survives_and_errors_keep_their_bound(fmt):
    x = normal(64, 128)
    got = quantize(x, fmt, block=(16, None))
    peak = x.unflatten(0, (4, 16)).abs().amax((1, 2)).repeat_interleave(16)[:, None]
    at_peak = x.abs() == peak
    torch.testing.assert_close(got[at_peak], x[at_peak], rtol=1e-6, atol=0)
    bound = peak / 127 / 2 if fmt == "int8" else x.abs() * 2.0 ** (-4 if fmt == "fp8_e4m3" else -3) + peak * 2.0**-18
    assert ((got - x).abs() <= bound * (1 + 1e-6)).all()


def test_int8_gives_whole_multiples_with_ties_to_even():
    x = torch.tensor([127.0, 0.5, 1.5, -2.5, -126.4, -0.0])
    assert_same(quantize(x, "int8"), torch.tensor([127.0, 0.0, 2.0, -2.0, -126.0, -0.0]))


def test_powers_of_two_as_scales():
    for peak, scale in ((448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (1.0, 2.0**-8), (3e30, 2.0**93)):
        x = torch.tensor([peak, peak / 3, peak / 1000])
        assert_same(quantize(x, "fp8_e4m3", scale="power_of_two"), round_to(x / scale, "fp8_e4m3") * scale)


def test_a_given_scale_overflows_as_the_format_says():
    x = torch.tensor([1.0, 2.0, -2.0, 0.3])
    fa3 = 2.0**-8  # P times 2^8 before its cast
    assert_same(quantize(x, "fp8_e4m3", scale=fa3), torch.tensor([1.0, 1.75, -1.75, 80 / 256]))
    assert_same(quantize(x, "int8", scale=2.0**-7), torch.tensor([127.0, 127.0, -127.0, 38.0]) / 128)
    assert_same(quantize(x * 1e5, "fp8_e5m2", scale=1.0)[1:3], torch.tensor([math.inf, -math.inf]))


def test_a_scale_that_float64_holds_is_used():
    x = torch.tensor([1.0, -3.0], dtype=torch.float64) * 1e-60
    assert_same(quantize(x, "int8", scale=1e-60), torch.tensor([1.0, -3.0], dtype=torch.float64) * 1e-60)


def test_zeros_and_tiny_values_need_no_division_by_zero():
    assert_same(quantize(torch.zeros(4, 4), "int8", block=2), torch.zeros(4, 4))
    tiny = quantize(torch.tensor([1e-45, -3e-42, 0.0]), "fp8_e4m3")
    assert (tiny.abs() <= 1e-40).all()


def test_not_a_number_and_infinity_do_not_spread():
    x = torch.tensor([[1.0, math.nan, 3.0], [math.inf, 2.0, -math.inf]])
    got = quantize(x, FP8_E4M3, block=(1, None))
    expected = torch.tensor([[1.0, math.nan, 3.0], [2.0, 2.0, -2.0]])
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=0.07, atol=0)


def test_shape_dtype_and_gradient():
    x = normal(3, 5, 8).requires_grad_()
    (quantize(x, "int8", block=4) * torch.arange(8.0)).sum().backward()
    assert_same(x.grad, torch.arange(8.0).expand(3, 5, 8))
    half = normal(3, 8).bfloat16()
    assert_same(quantize(half, "int8"), quantize(half.float(), "int8"))
    assert_same(quantize(normal(8, 6).mT, "int8", block=3), quantize(normal(8, 6).mT.contiguous(), "int8", block=3))
    assert quantize(torch.zeros(0, 4), "int8", block=(2, 3)).shape == (0, 4)
    assert quantize(torch.tensor(3.0), "int8").item() == 3.0


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_hadamard_is_the_sylvester_matrix(size):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = normal(3, 2, size).double()
    torch.testing.assert_close(hadamard(x), x @ matrix / math.sqrt(size), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-13, atol=1e-13)


def test_hadamard_keeps_products_and_spreads_outliers():
    q, k = normal(2, 10, 64, seed=1), normal(2, 10, 64, seed=2)
    torch.testing.assert_close(hadamard(q) @ hadamard(k).mT, q @ k.mT, rtol=1e-5, atol=1e-5)
    k[..., 5] += 100.0
    plain, spread = quantize(k, "int8"), hadamard(quantize(hadamard(k), "int8"))
    assert (spread - k).square().mean() < (plain - k).square().mean() / 20


def test_hadamard_gradient_and_dtype():
    x = normal(2, 16).requires_grad_()
    weights = normal(2, 16, seed=3)
    (hadamard(x) * weights).sum().backward()
    torch.testing.assert_close(x.grad, hadamard(weights))
    half = normal(4, 32).bfloat16()
    assert_same(hadamard(half), hadamard(half.float()).bfloat16())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.arange(3), "int8"), "floating-point tensor, got torch.int64"),
        (lambda: quantize(torch.ones(3), "int9"), "unknown format 'int9'"),
        (lambda: quantize(torch.ones(3), "int8", block=0), "block=0: use None, a positive int"),
        (lambda: quantize(torch.ones(3), "int8", block=(2, 2, 2)), "pair"),
        (lambda: quantize(torch.ones(3), "int8", block=(2, 2)), r"block=\(2, 2\) needs more dimensions .* \(3,\)"),
        (lambda: quantize(torch.ones(3), "int8", scale="mean"), "scale='mean' is unknown: use 'max', 'power_of_two'"),
        (lambda: quantize(torch.ones(3), "int8", scale=-1.0), "scale=-1.0: use a positive"),
        (lambda: quantize(torch.ones(3), "int8", scale=1e-60), "scale=1e-60 .* 0.0 in torch.float32: use a positive"),
        (lambda: quantize(torch.ones(3), "fp16", scale=1e-60), "scale=1e-60 .* 0.0 in torch.float32: use a positive"),
        (lambda: quantize(torch.ones(3).half(), "fp16", scale=1e300), r"scale=1e\+300 .* inf in torch.float32: use"),
        (lambda: hadamard(torch.ones(2, 48)), r"power of two, got shape \(2, 48\)"),
        (lambda: hadamard(torch.ones(4, dtype=torch.int32)), "floating-point tensor"),
    ],
)
def test_mistakes_are_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call()
