"""Rounding at the sites of a policy while a computation runs, with overflows counted where they are possible."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from fa_study.formats import FloatFormat
from fa_study.rounding import SITES, RoundingPolicy


class Sites:
    """Rounds values at the sites of a policy: ``sites("scores", x)``.

    Parameters
    ----------
    policy : RoundingPolicy
    carrier : torch.dtype
        The dtype of all values. A site whose format is the carrier itself costs nothing.
    counting : bool
        Count overflows. Costs a pass over the tile at each site, so callers ask for it only where
        `fa_study.attention.bounds` says so.
    """

    def __init__(
        self, policy: RoundingPolicy, carrier: torch.dtype, generator: torch.Generator | None, counting: bool
    ) -> None:
        self.policy, self.carrier, self.generator, self.counting = policy, carrier, generator, counting
        self.overflows = Counter(dict.fromkeys(SITES, 0))
        self._rounding = {site: getattr(policy, site) for site in SITES}
        self._free = {s for s, r in self._rounding.items() if is_exact(r.format, carrier)}

    def __call__(self, site: str, x: Tensor, dead: Tensor | None = None, rows: int | None = None) -> Tensor:
        """x rounded to the site's format. Values where `dead`, and rows from `rows` on, are not counted."""
        rounded = x if site in self._free else self._rounding[site](x, self.generator)
        if self.counting and rounded is not x:
            self._count(site, x.isfinite() & self._beyond(site, x, rounded), dead, rows)
        return rounded

    def is_free(self, site: str) -> bool:
        """Whether rounding at the site changes nothing."""
        return site in self._free

    def product(
        self, site: str, x: Tensor, finite: bool, dead: Tensor | None = None, rows: int | None = None
    ) -> Tensor:
        """As a call, for a matrix product: from `finite` operands an infinite product is an overflow as well."""
        rounded = x if site in self._free else self._rounding[site](x, self.generator)
        if self.counting and finite:
            self._count(site, ~x.isfinite() | self._beyond(site, x, rounded), dead, rows)
        elif self.counting:
            self._count(site, x.isfinite() & self._beyond(site, x, rounded), dead, rows)
        return rounded

    def _beyond(self, site: str, x: Tensor, rounded: Tensor) -> Tensor:
        fmt = self._rounding[site].format
        # Saturating formats and rounding toward zero leave no infinity behind: compare with where rounding overflows.
        half_step = fmt.max * fmt.unit_roundoff / (2 - fmt.unit_roundoff)
        return ~rounded.isfinite() | (x.abs() >= fmt.max + half_step)

    def _count(self, site: str, beyond: Tensor, dead: Tensor | None, rows: int | None) -> None:
        if dead is not None:
            beyond = beyond & ~dead
        self.overflows[site] += int(beyond[..., :rows, :].sum())


def is_exact(fmt: FloatFormat, dtype: torch.dtype) -> bool:
    """Whether rounding a tensor of this dtype to the format changes nothing."""
    return fmt.torch_dtype == dtype


def holds(dtype: torch.dtype, fmt: FloatFormat) -> bool:
    """Whether a tensor of this dtype can hold every value of the format."""
    info = torch.finfo(dtype)
    return (
        info.eps <= 2.0**-fmt.mantissa_bits and info.max >= fmt.max and info.tiny * info.eps <= fmt.smallest_subnormal
    )


def result_dtype(given: torch.dtype, fmt: FloatFormat) -> torch.dtype:
    """The dtype of a result in the format: the one that was given where it is exact, else float32 or float64."""
    return next(t for t in (given, torch.float32, torch.float64) if holds(t, fmt))
