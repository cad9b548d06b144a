"""What a floating-point format is, the seven named ones, and how text becomes a format."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch

MAX_MANTISSA_BITS = 24
OVERFLOWS = ("inf", "saturate", "nan")


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format with subnormals and a signed zero.

    With exponent code e and fraction code f, a value is ``(-1)^s * 2^(max(e, 1) - bias) * ([e > 0] + f / 2^M)`` where
    M is `mantissa_bits` and ``bias = 2^(exponent_bits - 1) - 1``.

    Parameters
    ----------
    name : str
        How the format is printed. Two formats that differ in the name only are equal.
    exponent_bits : int
        2 to 11.
    mantissa_bits : int
        Stored fraction bits, 1 to 24; 52 is allowed for FP64 alone. FP64 carriers would round anything else between
        25 and 51 bits twice.
    overflow : {"inf", "saturate", "nan"}
        What a value becomes that rounds beyond `max`: an infinity, the largest finite value, or NaN. An infinity on
        input is treated in the same way.
    infinities : bool, optional
        True: the highest exponent code holds infinity and NaN, as in IEEE 754. False: it holds numbers, and only the
        code with all ones is NaN, as in OCP E4M3. By default True where `overflow` is "inf", else False.

    Raises
    ------
    ValueError
        If a field is out of range, or overflow="inf" is asked of a format without infinities.
    """

    name: str = field(compare=False)
    exponent_bits: int
    mantissa_bits: int
    overflow: str = "inf"
    infinities: bool | None = None

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOWS:
            raise ValueError(f"overflow={self.overflow!r} is unknown: use one of {', '.join(OVERFLOWS)}")
        if not 2 <= self.exponent_bits <= 11:
            raise ValueError(f"format {self.name!r} has {self.exponent_bits} exponent bits: use 2 to 11")
        is_fp64 = (self.exponent_bits, self.mantissa_bits) == (11, 52)
        if not (1 <= self.mantissa_bits <= MAX_MANTISSA_BITS or is_fp64):
            raise ValueError(
                f"format {self.name!r} has {self.mantissa_bits} fraction bits: use 1 to {MAX_MANTISSA_BITS}, because "
                "values computed in FP64 would be rounded twice on the way to a wider format (FP64 itself is fine)"
            )
        if self.infinities is None:
            object.__setattr__(self, "infinities", self.overflow == "inf")
        if self.overflow == "inf" and not self.infinities:
            raise ValueError(f"format {self.name!r} has no infinities: use overflow='saturate' or 'nan'")
        if self.exponent_bits == 11 and not self.infinities:
            raise ValueError(f"format {self.name!r} without infinities exceeds float64: use at most 10 exponent bits")

    def __str__(self) -> str:
        return self.name

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return self.bias if self.infinities else self.bias + 1

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        last_step = 2.0**-self.mantissa_bits if self.infinities else 2.0 ** (1 - self.mantissa_bits)
        return (2.0 - last_step) * 2.0**self.max_exponent

    @cached_property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @cached_property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @cached_property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal number to nearest."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @cached_property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype whose values and overflow are those of this format (FP8 dtypes differ in overflow: not listed)."""
        if self.overflow != "inf":
            return None
        return _NATIVE.get((self.exponent_bits, self.mantissa_bits))


_NATIVE = {(11, 52): torch.float64, (8, 23): torch.float32, (8, 7): torch.bfloat16, (5, 10): torch.float16}

FP64 = FloatFormat("fp64", 11, 52)
FP32 = FloatFormat("fp32", 8, 23)
TF32 = FloatFormat("tf32", 8, 10)
BF16 = FloatFormat("bf16", 8, 7)
FP16 = FloatFormat("fp16", 5, 10)
FP8_E5M2 = FloatFormat("fp8_e5m2", 5, 2)
# Saturating, as the conversions of the FP8 kernels do; dataclasses.replace(FP8_E4M3, overflow="nan") gives the other.
FP8_E4M3 = FloatFormat("fp8_e4m3", 4, 3, overflow="saturate")

KNOWN_FORMATS = {f.name: f for f in (FP64, FP32, TF32, BF16, FP16, FP8_E5M2, FP8_E4M3)}


@cache
def _parse_text(text: str) -> FloatFormat:
    if text in KNOWN_FORMATS:
        return KNOWN_FORMATS[text]
    # Whoever writes e4m3 means the FP8 format with the largest value 448, not an IEEE-like one that ends at 240.
    if text == "e4m3":
        return FP8_E4M3
    match = re.fullmatch(r"e(\d+)m(\d+)", text)
    if match is None:
        raise ValueError(f"unknown format {text!r}: use one of {', '.join(KNOWN_FORMATS)}, or e<E>m<M> such as e6m9")
    return FloatFormat(text, int(match[1]), int(match[2]))


def parse_format(value: str | FloatFormat) -> FloatFormat:
    """The format that a text names.

    Parameters
    ----------
    value : str or FloatFormat
        "fp64", "fp32", "tf32", "bf16", "fp16", "fp8_e5m2", "fp8_e4m3", or "e<E>m<M>" for E exponent and M fraction
        bits with infinities as in IEEE 754 ("e4m3" alone means "fp8_e4m3"). A FloatFormat is returned as it is.

    Raises
    ------
    ValueError
        If the text names no format; the message lists those that are known.
    """
    if isinstance(value, FloatFormat):
        return value
    if not isinstance(value, str):
        raise ValueError(f"a format is a FloatFormat or its text, got {type(value).__name__}")
    return _parse_text(value)
