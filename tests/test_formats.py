"""Formats and rounding against native casts, NumPy, gfloat and cases reported by users of other packages."""

from __future__ import annotations

import dataclasses
import math

import gfloat
import numpy as np
import pytest
import torch
from float_checks import assert_same, codes
from gfloat.types import Domain

from fa_study import formats as formats_module
from fa_study.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, TF32, FloatFormat, parse_format, round_to

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
        for got in (round_to(torch.from_numpy(x), FP16), generic(torch.from_numpy(x), FP16)):
            # Equal bits are the quick answer; only NaNs may differ in theirs.
            if not torch.equal(got.view(torch.int32), expected.view(torch.int32)):
                assert_same(got, expected)


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
