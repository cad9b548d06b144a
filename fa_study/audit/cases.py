"""The inputs that an attention is tried on: shapes, distributions, logit scales, features, all from a seed.

Shape letters: B batch, H query heads, Hkv key heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What counts as the right function at all, as a relative L2 error; rounding is judged elsewhere. TF32 passes for fp32.
CLOSE = {"fp64": 1e-6, "fp32": 3e-3, "bf16": 0.04, "fp16": 0.01}
DISTRIBUTIONS = ("normal", "outliers", "positive")


def _normal(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    # In FP32, whatever the caller's default dtype: another one would draw other numbers.
    return torch.randn(shape, generator=g, dtype=torch.float32)


def _uniform(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """One call, reproducible from its fields.

    Attributes
    ----------
    distribution : "normal"; "outliers": N(0, 1) + N(0, 100) with probability 0.001, as FlashAttention-3 tests;
        "positive": V of one sign, so that errors of one sign do not cancel.
    logits : standard deviation of the scaled scores.
    features : names of what is asked for besides Q, K and V: causal, mask, bias, scale, softcap, window.
    """

    dtype: str = "fp32"
    L: int = 128  # kernels that take few lengths take this one
    S: int = 128
    D: int = 64
    B: int = 2
    H: int = 4
    Hkv: int = 4
    distribution: str = "normal"
    logits: float = 1.0
    features: tuple[str, ...] = ()
    seed: int = 0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in the case's dtype."""
        g = torch.Generator().manual_seed(1000 * self.seed + self.L + 7 * self.S + 31 * self.D)
        q = _normal((self.B, self.H, self.L, self.D), g) * self.logits
        k, v = (_normal((self.B, self.Hkv, self.S, self.D), g) for _ in range(2))
        if self.distribution == "outliers":
            for x in (q, k, v):
                x += 10.0 * _normal(x.shape, g) * (_uniform(x.shape, g) < 0.001)
        if self.distribution == "positive":
            v = v.abs()
        return tuple(x.to(DTYPES[self.dtype]) for x in (q, k, v))

    def dout(self) -> Tensor:
        """The gradient of the output, in the case's dtype."""
        g = torch.Generator().manual_seed(1000 * self.seed + 1)
        return _normal((self.B, self.H, self.L, self.D), g).to(DTYPES[self.dtype])

    def values(self, alignment: str = "top_left") -> dict[str, object]:
        """The features as keywords of `fa_study.attention`; every row keeps a key under the mask."""
        g = torch.Generator().manual_seed(1000 * self.seed + 2)
        mask = _uniform((self.B, 1, self.L, self.S), g) < 0.7
        mask[..., 0] = True
        every = {
            "causal": alignment,
            "mask": mask,
            "bias": _normal((1, self.H, self.L, self.S), g).to(DTYPES[self.dtype]),
            "scale": 0.5 / math.sqrt(self.D),
            "softcap": 2.0,
            "window": (self.S // 4, self.S // 8),
        }
        return {name: every[name] for name in self.features}

    def replace(self, **fields: object) -> Case:
        """A copy with some fields changed."""
        return replace(self, **fields)

    def __str__(self) -> str:
        """For tables: "bf16 113x203 D64, outliers, logits 4, causal"."""
        heads = "" if self.Hkv == self.H else f" heads {self.H}/{self.Hkv}"
        parts = [f"{self.dtype} {self.L}x{self.S} D{self.D}{heads}"]
        parts += [self.distribution] if self.distribution != "normal" else []
        parts += [f"logits {self.logits:g}"] if self.logits != 1 else []
        return ", ".join([*parts, *self.features])
