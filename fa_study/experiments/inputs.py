"""The inputs of the micro-benchmark: Q, K and V from four distributions, a function of the seed alone, or real ones.

Shape letters: B seeds (one batch entry each), L queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fa_study.tables import read_table

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

    Every entry is a function of its own seed: other seeds beside it change nothing. With "trained", a seed is the
    number of a stored sample: a layer of a small text-to-image model at work on a picture, its first S keys and L of
    its rows.

    Raises
    ------
    ValueError : the distribution is unknown, or a size is not positive.
    """
    if distribution not in LABELS:
        raise ValueError(f"distribution={distribution!r} is unknown: use one of {', '.join(LABELS)}")
    if min(L, S, D) < 1 or not len(seeds):
        raise ValueError(f"L, S, D and the number of seeds are positive, got {L}, {S}, {D} and {len(seeds)}")
    if distribution == "trained":
        return _trained(seeds, L, S, D)
    entries = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        entries.append([DISTRIBUTIONS[distribution]((1, n, D), generator) for n in (L, S, S)])
    q, k, v = (torch.stack(x) for x in zip(*entries))
    return q, k, v


def _trained(seeds: Sequence[int], L: int, S: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    table = read_table("trained_qkv.parquet")
    values = [name for name in table if name.startswith("d")]
    if len(values) != D:
        raise ValueError(f"the trained model has heads of {len(values)}, got D={D}")
    entries = []
    for seed in seeds:
        sample = table[table["sample"] == seed]
        tensors = []
        for name, size in (("q", L), ("k", S), ("v", S)):
            rows = sample.loc[sample["tensor"] == name, values].to_numpy(copy=True)
            if size > len(rows):
                raise ValueError(f"sample {seed} of the trained model has {len(rows)} rows in {name}, got {size}")
            tensors.append(torch.from_numpy(rows[:size]).double().unsqueeze(0))
        entries.append(tensors)
    q, k, v = (torch.stack(x) for x in zip(*entries))
    return q, k, v
