"""The random inputs of the micro-benchmark: Q, K and V from five distributions, a function of the seed alone.

Shape letters: B seeds (one batch entry each), L queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _symmetric(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 2 * _uniform(shape, generator) - 1


def _outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """N(0, 1) + N(0, 100) Bernoulli(0.001), the test input of FlashAttention 3 (arXiv 2407.08608, Table 3)."""
    body, tail = _normal(shape, generator), 10 * _normal(shape, generator)
    return body + tail * (_uniform(shape, generator) < 0.001)


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal,
    "uniform": _uniform,
    "symmetric": _symmetric,
    "outliers": _outliers,
}
# What a reader sees.
LABELS = {
    "normal": "normal N(0, 1)",
    "uniform": "uniform [0, 1)",
    "symmetric": "uniform [-1, 1)",
    "outliers": "normal with rare outliers",
    "trained": "trained model",
}


def draw(distribution: str, seeds: Sequence[int], *, L: int, S: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q (B, 1, L, D), K and V (B, 1, S, D) in float64, one batch entry per seed.

    Every entry is a function of its own seed: other seeds beside it change nothing.

    Raises
    ------
    ValueError : the distribution is unknown, or a size is not positive.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution={distribution!r} is unknown: use one of {', '.join(DISTRIBUTIONS)}")
    if min(L, S, D) < 1 or not len(seeds):
        raise ValueError(f"L, S, D and the number of seeds are positive, got {L}, {S}, {D} and {len(seeds)}")
    entries = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        entries.append([DISTRIBUTIONS[distribution]((1, n, D), generator) for n in (L, S, S)])
    q, k, v = (torch.stack(x) for x in zip(*entries))
    return q, k, v
