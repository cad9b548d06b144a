"""Formats and rounding against native casts, NumPy, gfloat and cases reported by users of other packages."""

from __future__ import annotations

import dataclasses
import math

import gfloat
import numpy as np
import pytest
import torch
from gfloat.types import Domain
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_study import formats as formats_module
from fa_study.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, FP64, TF32, FloatFormat, parse_format, round_to

inf, nan = math.inf, math.nan
E4M3_NAN = dataclasses.replace(FP8_E4M3, overflow="nan")
GENERAL = [
    FP8_E4M3,
    E4M3_NAN,
    FP8_E5M2,
    dataclasses.replace(FP8_E5M2, overflow="saturate"),
    TF32,
    *map(parse_format, ("e2m1", "e3m4", "e4m1", "e5m7", "e6m9", "e7m4", "e8m2", "e8m13")),
]


def generic(x: torch.Tensor, fmt: FloatFormat, rounding: str = "nearest_even") -> torch.Tensor:
    """The path of the formats that have no dtype of their own, for those that have one too."""
    return formats_module._round_in_chunks(x, fmt, rounding, None)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal values, NaN for NaN and the sign of zeros included."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    wrong = ~((got == expected) & (got.signbit() == expected.signbit()) | (got.isnan() & expected.isnan()))
    assert not wrong.any(), f"{int(wrong.sum())} differ, first {got[wrong][0]} for {expected[wrong][0]}"


def codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


def around(values: torch.Tensor) -> torch.Tensor:
    """Values, the midpoints between them, and both neighbours of all of these in the dtype of `values`."""
    finite = values[values.isfinite()].unique()
    points = torch.cat([values, (finite[1:] + finite[:-1]) / 2, -values])
    infinity = torch.tensor(inf, dtype=values.dtype)
    return torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])


def all_values(fmt: FloatFormat) -> torch.Tensor:
    """Every finite value of a format, and the first one that would follow the largest, in float64."""
    fraction = torch.arange(2**fmt.mantissa_bits, dtype=torch.float64) / 2**fmt.mantissa_bits
    exponents = torch.arange(fmt.min_exponent, fmt.max_exponent + 1, dtype=torch.float64)
    normal = ((1 + fraction) * torch.exp2(exponents)[:, None]).flatten()
    values = torch.cat([fraction * fmt.smallest_normal, normal[normal <= fmt.max]])
    return torch.cat([values, (2 * values[-1] - values[-2])[None]])


def oracle(x: torch.Tensor, fmt: FloatFormat, rounding: str = "nearest_even") -> torch.Tensor:
    """gfloat's answer, in float64."""
    info = gfloat.FormatInfo(
        fmt.name,
        1 + fmt.exponent_bits + fmt.mantissa_bits,
        fmt.mantissa_bits + 1,
        bias=fmt.bias,
        is_signed=True,
        domain=Domain.Extended if fmt.infinities else Domain.Finite,
        has_nz=True,
        num_high_nans=2**fmt.mantissa_bits - 1 if fmt.infinities else 1,
        has_subnormals=True,
        is_twos_complement=False,
    )
    mode = {"nearest_even": gfloat.RoundMode.TiesToEven, "toward_zero": gfloat.RoundMode.TowardZero}[rounding]
    with np.errstate(all="ignore"):
        rounded = gfloat.round_ndarray(info, x.double().numpy(), mode, sat=fmt.overflow == "saturate")
    return torch.from_numpy(rounded)


@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)], ids=str)
def test_native_formats_equal_native_casts_at_every_code_neighbour_and_midpoint(fmt, dtype):
    x = around(codes(dtype).float())
    assert x.numel() > 9 * 60_000
    expected = x.to(dtype).float()
    assert_same(round_to(x, fmt), expected)
    assert_same(generic(x, fmt), expected)
    assert_same(round_to(x.double(), fmt), expected.double())


def test_bf16_equals_integer_arithmetic_and_fp16_equals_numpy():
    """The native casts are no authority on themselves."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 1_000_000, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    with np.errstate(over="ignore"):
        assert_same(round_to(x, FP16), torch.from_numpy(x.numpy().astype(np.float16).astype(np.float32)))
    wide = bits.astype(np.uint64)
    rounded = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    expected = torch.where(x.isnan(), x, torch.from_numpy(rounded.view(np.float32)))
    assert_same(round_to(x, BF16), expected)


@pytest.mark.slow
def test_fp16_equals_numpy_for_every_float32():
    step = 2**23
    for start in range(0, 2**32, step):
        x = np.arange(start, start + step, dtype=np.uint32).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = torch.from_numpy(x.astype(np.float16).astype(np.float32))
        assert_same(round_to(torch.from_numpy(x), FP16), expected)
        assert_same(generic(torch.from_numpy(x), FP16), expected)


@pytest.mark.parametrize("fmt", GENERAL, ids=lambda f: f"{f}-{f.overflow}")
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_general_formats_equal_gfloat_on_random_bits(fmt, rounding):
    bits = np.random.default_rng(2).integers(0, 2**32, 1_000_000, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    if rounding == "toward_zero":
        x = x[:100_000]
    assert_same(round_to(x, fmt, rounding=rounding).double(), oracle(x, fmt, rounding))


@pytest.mark.parametrize("fmt", GENERAL, ids=lambda f: f"{f}-{f.overflow}")
def test_general_formats_equal_gfloat_at_every_midpoint(fmt):
    values = all_values(fmt)
    # Neighbours as well, but for the format of four million values.
    x = around(values) if len(values) < 2**20 else (values[1:] + values[:-1]) / 2
    assert_same(round_to(x, fmt), oracle(x, fmt))
    x = x[x.float() == x].float()
    assert_same(round_to(x, fmt).double(), oracle(x, fmt))


@pytest.mark.parametrize("name", ["e8m23", "e5m22", "e5m24", "e8m24", "e9m5", "e11m10", "e11m24", "bf16", "fp16"])
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero"])
def test_float64_carriers_equal_gfloat(name, rounding):
    fmt = parse_format(name)
    rng = np.random.default_rng(3)
    anywhere = rng.integers(0, 2**64, 50_000, dtype=np.uint64).view(np.float64)
    # The same fractions, but with exponents inside the format's range, the subnormals and a little beyond.
    low, high = max(fmt.min_exponent - fmt.mantissa_bits - 2, -1021), min(fmt.max_exponent + 2, 1023)
    inside = np.ldexp(
        np.frexp(anywhere[np.isfinite(anywhere)])[0], rng.integers(low, high, np.isfinite(anywhere).sum())
    )
    # Ties and their neighbours are rare among random numbers.
    ties = oracle(torch.from_numpy(inside), dataclasses.replace(fmt, mantissa_bits=min(fmt.mantissa_bits + 1, 24)))
    x = torch.cat([torch.from_numpy(np.concatenate([anywhere, inside])), around(ties[:20_000])])
    assert_same(round_to(x, fmt, rounding=rounding), oracle(x, fmt, rounding))


def test_float64_is_not_rounded_through_float32():
    above_tie = torch.tensor([1 + 2**-11 + 2**-40, 1 + 2**-8 + 2**-40, 2**-25 + 2**-60], dtype=torch.float64)
    assert round_to(above_tie[:1], FP16).item() == 1 + 2**-10
    assert round_to(above_tie[1:2], BF16).item() == 1 + 2**-7
    assert round_to(above_tie[2:], FP16).item() == 2**-24


def test_e4m3_overflow_is_the_formats_choice():  # F1
    x = torch.tensor([448.0, 464, 465, 480, 1000, inf, -inf, nan])
    assert_same(round_to(x, E4M3_NAN), torch.tensor([448.0, 448, nan, nan, nan, nan, nan, nan]))
    assert_same(round_to(x, FP8_E4M3), torch.tensor([448.0] * 6 + [-448, nan]))
    assert FloatFormat("e4m3", 4, 3, overflow="nan") == E4M3_NAN
    assert parse_format("e4m3") == parse_format("fp8_e4m3") == FP8_E4M3


@pytest.mark.parametrize(
    ("value", "fmt", "expected"),
    [
        (65536.0, FP16, inf),  # F2
        (65520.0, FP16, inf),
        (3.0428173e-05, FP16, 3.0457973e-05),
        (inf, BF16, inf),  # F3
        (1e-40, BF16, 9.183549615799121e-41),
        (3.0, FloatFormat("e8m23", 8, 23), 3.0),  # F4
        (1.00048828125, FP16, 1.0),
        (2.9802321e-08, FP16, 0.0),  # F5
        (3.4028235e38, BF16, inf),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_other_packages_got_wrong(value, fmt, expected, dtype):
    x = torch.tensor([value], dtype=torch.float32).to(dtype)
    want = torch.tensor([expected], dtype=torch.float32).to(dtype)
    for sign in (1, -1):
        assert_same(round_to(sign * x, fmt), sign * want)
    if dtype == torch.float32:
        assert_same(generic(x, fmt), want)


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
