"""What several tests of numbers need."""

from __future__ import annotations

import torch


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal values, NaN for NaN and the sign of zeros included."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    wrong = ~((got == expected) & (got.signbit() == expected.signbit()) | (got.isnan() & expected.isnan()))
    assert not wrong.any(), f"{int(wrong.sum())} differ, first {got[wrong][0]} for {expected[wrong][0]}"


def codes(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype, NaN and infinities included."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
