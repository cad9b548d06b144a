"""What holds for rounding in every format: directions, shapes, gradients, properties, and errors that explain."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from float_checks import assert_same, codes
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_study import formats as formats_module
from fa_study.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FP64, FloatFormat, parse_format, round_to

inf, nan = math.inf, math.nan
E4M3_NAN = dataclasses.replace(FP8_E4M3, overflow="nan")


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "fp8_e4m3", "tf32", "fp32"])
def test_toward_zero_never_overflows(name):
    fmt = parse_format(name)
    x = torch.tensor([fmt.max, fmt.max * 1.01, 1e300, -1e300, inf, -inf, nan, -0.0, -1e-320], dtype=torch.float64)
    top = fmt.max
    infinity = top if fmt.overflow == "saturate" else inf
    expected = [top, top, top, -top, infinity, -infinity, nan, -0.0, -0.0]
    assert_same(round_to(x, fmt, rounding="toward_zero"), torch.tensor(expected, dtype=torch.float64))


def test_toward_zero_without_infinities_keeps_finite_numbers_finite():
    x = torch.tensor([1e4, -1e4, inf])
    assert_same(round_to(x, E4M3_NAN, rounding="toward_zero"), torch.tensor([448.0, -448.0, nan]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "e5m2", "e6m9"])
def test_stochastic_rounding_is_unbiased(name, dtype):
    fmt = parse_format(name)
    n = 40_000
    u = fmt.smallest_subnormal
    values = torch.tensor([1.1, -1.1, 3.3, 0.3 * u, -2.7 * u, fmt.smallest_normal - 0.4 * u, 200.7], dtype=dtype)
    x = values[:, None].expand(-1, n)
    got = round_to(x, fmt, rounding="stochastic", generator=torch.Generator().manual_seed(4)).double()
    down = round_to(values.double(), fmt, rounding="toward_zero")
    for value, rounded, near in zip(values.double(), got, down):
        neighbours = rounded.unique()
        assert len(neighbours) == 2 and near in neighbours
        low, high = neighbours
        probability = (value - low) / (high - low)
        error = rounded.mean() - value
        assert abs(error) <= 4 * (high - low) * math.sqrt(probability * (1 - probability) / n)


def test_stochastic_rounding_keeps_values_of_the_format_and_specials():
    x = torch.tensor([0.0, -0.0, 1.5, -(2.0**-16), 57344, inf, -inf, nan]).repeat(100)
    assert_same(round_to(x, FP8_E5M2, rounding="stochastic"), x)


def test_stochastic_rounding_is_a_function_of_the_generator():
    x = torch.randn(3, 70_000, generator=torch.Generator().manual_seed(5))

    def rounded(x: torch.Tensor, seed: int) -> torch.Tensor:
        return round_to(x, BF16, rounding="stochastic", generator=torch.Generator().manual_seed(seed))

    assert_same(rounded(x, 1), rounded(x, 1))
    assert_same(rounded(x.mT.contiguous().mT, 1), rounded(x, 1))
    assert not torch.equal(rounded(x, 1), rounded(x, 2))
    threads = torch.get_num_threads()
    one = rounded(x, 1)
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert_same(rounded(x, 1), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["fp16", "e5m2", "fp8_e4m3"])
def test_shapes_strides_and_chunks(name):
    x = torch.randn(2, 3, formats_module.CHUNK // 3 + 5, generator=torch.Generator().manual_seed(6)) * 100
    whole = round_to(x, name)
    assert whole.shape == x.shape
    assert_same(round_to(x.transpose(0, 2), name), whole.transpose(0, 2))
    assert_same(round_to(x[..., ::7], name), whole[..., ::7])
    assert_same(torch.stack([round_to(v, name) for v in x.flatten()[:50]]), whole.flatten()[:50])
    assert round_to(x[:0], name).shape == x[:0].shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fp64", "fp32", "tf32", "bf16", "fp16", "fp8_e5m2", "fp8_e4m3", "e3m3"])
def test_dtype_is_kept_and_16_bit_carriers_agree_with_float64(dtype, name):
    x = codes(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16).to(dtype)
    before = x.clone()
    got = round_to(x, name)
    assert_same(got.double(), round_to(x.double(), name).to(dtype).double())
    assert_same(x, before)


def test_a_dtype_that_holds_only_what_the_format_holds_is_returned_as_it_is():
    x = torch.randn(5)
    assert (
        round_to(x, FP32) is x
        and round_to(x, FP64) is x
        and round_to(x.half(), "e6m11", rounding="toward_zero") is not None
    )
    half = x.half()
    assert round_to(half, "e6m11") is half


@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero", "stochastic"])
@pytest.mark.parametrize("name", ["fp64", "bf16", "e5m2"])
def test_gradients_pass_straight_through(name, rounding):
    x = torch.randn(7, requires_grad=True)
    weights = torch.arange(7.0)
    (round_to(x, name, rounding=rounding) * weights).sum().backward()
    assert_same(x.grad, weights)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 8), st.integers(1, 23), st.lists(st.floats(width=32), min_size=2, max_size=20))
def test_rounding_is_idempotent_monotone_and_odd(exponent_bits, mantissa_bits, values):
    fmt = FloatFormat("any", exponent_bits, mantissa_bits)
    x = torch.tensor(values).sort().values
    once = round_to(x, fmt)
    assert_same(round_to(once, fmt), once)
    assert_same(round_to(-x, fmt), -once)
    ordered = once[~once.isnan()]
    assert (ordered[1:] >= ordered[:-1]).all()


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 8), st.integers(1, 24), st.floats(width=32, allow_nan=False))
def test_float32_and_float64_carriers_agree(exponent_bits, mantissa_bits, value):
    fmt = FloatFormat("any", exponent_bits, mantissa_bits)
    x = torch.tensor([value])
    for rounding in ("nearest_even", "toward_zero"):
        if rounding == "toward_zero" and mantissa_bits == 24:
            continue
        wide = round_to(x.double(), fmt, rounding=rounding)
        assert_same(round_to(x, fmt, rounding=rounding), wide.float())


@pytest.mark.parametrize("fmt", [FP64, FP32, BF16, FP16], ids=str)
def test_properties_agree_with_torch(fmt):
    info = torch.finfo(fmt.torch_dtype)
    assert (fmt.max, fmt.smallest_normal, 2 * fmt.unit_roundoff) == (info.max, info.tiny, info.eps)
    assert fmt.smallest_subnormal == info.tiny * info.eps


def test_properties_of_fp8_formats():
    assert (FP8_E4M3.max, FP8_E4M3.smallest_subnormal, FP8_E4M3.torch_dtype) == (448, 2**-9, None)
    assert (FP8_E5M2.max, FP8_E5M2.smallest_subnormal) == (57344, 2**-16)
    assert dataclasses.replace(FP8_E5M2, overflow="saturate").max == 57344
    assert parse_format("e5m10") == FP16 and str(parse_format("e5m10")) == "e5m10"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_format("bf17"), "unknown format 'bf17'.*fp64, fp32, tf32, bf16, fp16, fp8_e5m2, fp8_e4m3"),
        (lambda: parse_format("E5M2"), "unknown format"),
        (lambda: parse_format(torch.float16), "FloatFormat or its text, got dtype"),
        (lambda: parse_format("e8m25"), "25 fraction bits.*1 to 24.*twice"),
        (lambda: parse_format("e11m51"), "51 fraction bits"),
        (lambda: parse_format("e12m3"), "12 exponent bits: use 2 to 11"),
        (lambda: parse_format("e4m0"), "0 fraction bits"),
        (lambda: FloatFormat("x", 4, 3, overflow="wrap"), "overflow='wrap'.*inf, saturate, nan"),
        (lambda: FloatFormat("x", 4, 3, infinities=False), "no infinities"),
        (lambda: round_to(torch.arange(3), "bf16"), "floating-point tensor, got torch.int64"),
        (lambda: round_to(1.5, "bf16"), "floating-point tensor, got float"),
        (
            lambda: round_to(torch.ones(1), "bf16", rounding="up"),
            "rounding='up'.*nearest_even, toward_zero, stochastic",
        ),
        (
            lambda: round_to(torch.ones(1).bfloat16(), "fp16", rounding="toward_zero"),
            "bfloat16.*cannot hold 65504",
        ),
        (lambda: round_to(torch.ones(1), "e5m24", rounding="toward_zero"), "float32 tensor cannot hold"),
    ],
)
def test_mistakes_are_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_infinity_in_a_16_bit_carrier_is_an_overflow_there_too():
    assert round_to(torch.tensor([1e30], dtype=torch.bfloat16), FP16).item() == inf
