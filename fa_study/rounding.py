"""Rounding sites: which format, and which direction, every intermediate value of attention is rounded to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from fa_study.formats import FP32, FP64, ROUNDINGS, FloatFormat, parse_format, round_to


@dataclass(frozen=True)
class Rounding:
    """A format and the way values are rounded to it. Calling it rounds a tensor, as `round_to` does."""

    format: FloatFormat
    mode: str = "nearest_even"

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", parse_format(self.format))
        if self.mode not in ROUNDINGS:
            raise ValueError(f"unknown rounding mode {self.mode!r}: use one of {', '.join(ROUNDINGS)}")

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return round_to(x, self.format, rounding=self.mode, generator=generator)

    def __str__(self) -> str:
        return self.format.name if self.mode == "nearest_even" else f"{self.format.name}:{self.mode}"


SiteRounding = str | FloatFormat | Rounding


def parse_rounding(value: SiteRounding) -> Rounding:
    """The rounding that a site's text names: "bf16", or with a mode, "bf16:stochastic" or "fp16:toward_zero".

    Raises
    ------
    ValueError
        If the format or the mode is unknown; the message lists those that are known.
    """
    if isinstance(value, Rounding):
        return value
    if not isinstance(value, str):
        return Rounding(parse_format(value))
    name, colon, mode = value.partition(":")
    return Rounding(parse_format(name), mode if colon else "nearest_even")


@dataclass(frozen=True)
class Accumulation:
    """How the sums inside a matrix product are kept: see `fa_study.attention.products.matmul`.

    Parameters
    ----------
    format : str, FloatFormat or Rounding
        Format of the running sum, "e8m13:toward_zero" for example. Kept as a Rounding.
    every : int, optional
        The sum is rounded after this many terms, counted anew after each promotion; None: once, at the end.
    promote : int, optional
        After this many terms the sum is added to an FP32 sum and starts again at zero; None: never.
    """

    format: SiteRounding = "fp32"
    every: int | None = None
    promote: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", parse_rounding(self.format))
        for name in ("every", "promote"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"Accumulation {name}={value!r}: use a positive number of terms, or None")

    def is_native(self, dtype: torch.dtype) -> bool:
        """Whether a plain product of float32 or float64 tensors of this dtype keeps its sums in this way."""
        native = Rounding(FP64 if dtype == torch.float64 else FP32)
        return self.every is None and self.promote is None and self.format == native

    def __str__(self) -> str:
        counts = [f"{name} {getattr(self, name)}" for name in ("every", "promote") if getattr(self, name)]
        return " ".join([str(self.format), *counts])


@dataclass(frozen=True, kw_only=True, repr=False)
class RoundingPolicy:
    """The rounding of every site of attention. Text and formats given for a site are kept as `Rounding`.

    Parameters
    ----------
    inputs : Q, K, V (and the gradient of the output) before anything else.
    scores : after each of product, scale, cap and bias.
    max : the running maximum m.
    exponentials : S - m and exp(S - m), what the row sum adds up.
    probabilities : the operand of the product with V, rounded from the unrounded exponentials unless `exponentials` is
        narrower.
    sum : the row sum l, after every addition.
    rescale : exp(m_old - m_new), by which l and the accumulator shrink when the maximum grows.
    accumulator : O after every product, rescaling and addition.
    output : the result.
    lse : the log-sum-exp.
    grad_scores : dS = P (dP - delta), the operand of the products that give dQ and dK.
    delta : the row sums of dO O (or P dP).
    grad_accumulator : dQ, dK and dV after every tile.
    products : Accumulation, or a format alone, for the sums inside all matrix products.

    Raises
    ------
    ValueError
        If a site or a format is unknown; the message lists those that are known.
    """

    inputs: SiteRounding = FP32
    scores: SiteRounding = FP32
    max: SiteRounding = FP32
    exponentials: SiteRounding = FP32
    probabilities: SiteRounding = FP32
    sum: SiteRounding = FP32
    rescale: SiteRounding = FP32
    accumulator: SiteRounding = FP32
    output: SiteRounding = FP32
    lse: SiteRounding = FP32
    grad_scores: SiteRounding = FP32
    delta: SiteRounding = FP32
    grad_accumulator: SiteRounding = FP32
    products: Accumulation | SiteRounding = FP32

    # Here, before __init__ can raise a TypeError that would not list the sites.
    def __new__(cls, *args: object, **sites: object) -> RoundingPolicy:
        unknown = [site for site in sites if site not in cls.__dataclass_fields__]
        if unknown:
            raise ValueError(f"unknown rounding site {unknown[0]!r}: use {', '.join(cls.__dataclass_fields__)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for site in SITES:
            object.__setattr__(self, site, parse_rounding(getattr(self, site)))
        if not isinstance(self.products, Accumulation):
            object.__setattr__(self, "products", Accumulation(self.products))

    @classmethod
    def uniform(cls, fmt: SiteRounding) -> RoundingPolicy:
        """Every site in one format, products in FP32 (FP64 for formats wider than FP32)."""
        rounding = parse_rounding(fmt)
        products = FP64 if rounding.format.mantissa_bits > FP32.mantissa_bits else FP32
        return cls(**dict.fromkeys(SITES, rounding), products=products)

    @classmethod
    def kernel(cls, fmt: SiteRounding) -> RoundingPolicy:
        """FlashAttention 2: inputs, probabilities, dS and results in `fmt`, everything inside in FP32."""
        return cls(inputs=fmt, probabilities=fmt, output=fmt, grad_scores=fmt)

    @classmethod
    def torch_cpu(cls, fmt: SiteRounding) -> RoundingPolicy:
        """PyTorch's CPU flash kernel: as `kernel`, but its backward pass adds dQ, dK and dV up in 16 bits."""
        return cls.kernel(fmt).replace(grad_accumulator=fmt)

    @classmethod
    def eager(cls, fmt: SiteRounding) -> RoundingPolicy:
        """16-bit eager attention: scores, normalised probabilities and results in `fmt`, softmax in FP32 inside."""
        return cls(inputs=fmt, scores=fmt, probabilities=fmt, output=fmt, grad_scores=fmt)

    def replace(self, **sites: SiteRounding | Accumulation) -> RoundingPolicy:
        """A copy with some sites changed."""
        return dataclasses.replace(self, **sites)

    @property
    def carrier(self) -> torch.dtype:
        """The dtype to compute in: float32 where rounding its results once more is exact, else float64.

        For + - * / and square root, a float32 result rounded to nearest in a format of precision p is the exact result
        rounded once if 24 >= 2 p + 2. In other directions the first rounding shows. FP32 needs no second rounding.
        """

        def is_exact_from_float32(r: Rounding) -> bool:
            if r.mode == "nearest_even" and r.format == FP32:
                return True
            return r.mode != "toward_zero" and r.format.mantissa_bits <= 10 and r.format.exponent_bits <= 8

        return torch.float32 if all(is_exact_from_float32(getattr(self, s)) for s in SITES) else torch.float64

    def __str__(self) -> str:
        """The most common rounding, then the sites that differ from it: "fp32, output bf16"."""
        common, _ = Counter(str(getattr(self, site)) for site in SITES).most_common(1)[0]
        others = [f"{s} {r}" for s in (*SITES, "products") if (r := str(getattr(self, s))) != common]
        return ", ".join([common, *others])

    def __repr__(self) -> str:
        sites = ", ".join(f"{s}={str(getattr(self, s))!r}" for s in SITES)
        a = self.products
        return (
            f"RoundingPolicy({sites}, products=Accumulation({str(a.format)!r}, every={a.every}, promote={a.promote}))"
        )


SITES = tuple(f.name for f in dataclasses.fields(RoundingPolicy) if f.name != "products")
