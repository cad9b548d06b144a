"""Which format each rounding site of attention uses: the policy that a computation is run under."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fa_study.formats import FP32, FP64, FloatFormat, parse_format
from fa_study.round import ROUNDINGS, round_to


@dataclass(frozen=True)
class Rounding:
    """A format and the way values are rounded to it. Calling it rounds a tensor, as `round_to` does."""

    format: FloatFormat
    mode: str = "nearest_even"

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return round_to(x, self.format, rounding=self.mode, generator=generator)

    def __str__(self) -> str:
        return self.format.name if self.mode == "nearest_even" else f"{self.format.name}:{self.mode}"


def parse_rounding(value: str | FloatFormat | Rounding) -> Rounding:
    """The rounding that a site's text names: a format, or format and mode, as in "bf16:stochastic".

    Raises
    ------
    ValueError
        If the format or the mode is unknown; the message lists those that are known.
    """
    if isinstance(value, Rounding):
        return value
    if not isinstance(value, str):
        return Rounding(parse_format(value))
    name, _, mode = value.partition(":")
    mode = mode or "nearest_even"
    if mode not in ROUNDINGS:
        raise ValueError(f"unknown rounding mode {mode!r} in {value!r}: use one of {', '.join(ROUNDINGS)}")
    return Rounding(parse_format(name), mode)


@dataclass(frozen=True)
class Accumulation:
    """How the sums inside a matrix product are kept.

    Parameters
    ----------
    format : str, FloatFormat or Rounding
        Format of the running sum.
    every : int, optional
        The sum is rounded after this many terms; None: once, at the end.
    promote : int, optional
        After this many terms the sum is added to an FP32 sum and starts again at zero; None: never.
    """

    format: str | FloatFormat | Rounding = "fp32"
    every: int | None = None
    promote: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", parse_rounding(self.format))
        for name in ("every", "promote"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Accumulation {name}={value!r}: use a positive number of terms, or None")

    def __str__(self) -> str:
        return str(self.format) + "".join(
            f" {name} {value}" for name in ("every", "promote") if (value := getattr(self, name)) is not None
        )


@dataclass(frozen=True, kw_only=True)
class RoundingPolicy:
    """One rounding per site of attention; a site given as text or as a FloatFormat becomes a `Rounding`."""

    inputs: Rounding | FloatFormat | str = "fp32"
    scores: Rounding | FloatFormat | str = "fp32"
    max: Rounding | FloatFormat | str = "fp32"
    exponentials: Rounding | FloatFormat | str = "fp32"
    probabilities: Rounding | FloatFormat | str = "fp32"
    sum: Rounding | FloatFormat | str = "fp32"
    rescale: Rounding | FloatFormat | str = "fp32"
    accumulator: Rounding | FloatFormat | str = "fp32"
    output: Rounding | FloatFormat | str = "fp32"
    lse: Rounding | FloatFormat | str = "fp32"
    grad_scores: Rounding | FloatFormat | str = "fp32"
    delta: Rounding | FloatFormat | str = "fp32"
    grad_accumulator: Rounding | FloatFormat | str = "fp32"
    products: Accumulation | Rounding | FloatFormat | str = "fp32"

    def __post_init__(self) -> None:
        for site in SITES:
            object.__setattr__(self, site, parse_rounding(getattr(self, site)))
        if not isinstance(self.products, Accumulation):
            object.__setattr__(self, "products", Accumulation(self.products))

    @classmethod
    def uniform(cls, fmt: str | FloatFormat | Rounding) -> RoundingPolicy:
        """Every site in one format; products in FP32, or FP64 for an FP64 policy."""
        rounding = parse_rounding(fmt)
        products = FP64 if rounding.format.mantissa_bits > FP32.mantissa_bits else FP32
        return cls(**dict.fromkeys(SITES, rounding), products=products)

    @classmethod
    def kernel(cls, fmt: str | FloatFormat | Rounding) -> RoundingPolicy:
        """FlashAttention 2 and 3: inputs, probabilities, output and grad_scores in `fmt`, FP32 inside."""
        return cls(inputs=fmt, probabilities=fmt, output=fmt, grad_scores=fmt)

    @classmethod
    def eager(cls, fmt: str | FloatFormat | Rounding) -> RoundingPolicy:
        """Eager attention: scores, normalised probabilities and output in `fmt`, softmax in FP32 inside."""
        return cls(inputs=fmt, scores=fmt, probabilities=fmt, output=fmt, grad_scores=fmt)

    def replace(self, **sites: Rounding | FloatFormat | str | Accumulation) -> RoundingPolicy:
        """A copy with some sites changed. An unknown site is a ValueError that lists the known ones."""
        for site in sites:
            if site not in SITES and site != "products":
                raise ValueError(f"unknown rounding site {site!r}: use one of {', '.join(SITES)}, products")
        return replace(self, **sites)

    @property
    def carrier(self) -> torch.dtype:
        """The dtype to compute in: float32 where rounding its results once more is exact, else float64.

        A result in FP32 rounded again to p bits of precision to nearest equals the exact result rounded once for
        + - * / and sqrt if 24 >= 2 p + 2; FP32 itself needs no second rounding. Toward zero the second rounding shows.
        """
        roundings = [getattr(self, site) for site in SITES]
        narrow = all(
            r.format == FP32
            and r.mode == "nearest_even"
            or (r.format.mantissa_bits <= 10 and r.format.exponent_bits <= 8 and r.mode != "toward_zero")
            for r in roundings
        )
        return torch.float32 if narrow else torch.float64


SITES = tuple(f.name for f in fields(RoundingPolicy) if f.name != "products")
