"""What the Wasserstein distance does not see: where in a tensor a value sits, and values that moved past each other.

n values per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from fa_study.distance import tensor_distance

SEEDS = tuple(range(5))
# Values of a bias, of a small matrix and of a large one.
NUMELS = (64, 4096, 262_144)
SIZES = tuple(float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 3))
_COLUMNS = ["wasserstein", "wasserstein_floor", "mean_difference", "relative_l2"]


def arrangements(n: int = 4096, seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
    """A tensor of n normal values beside the same values in another order, beside other values, and beside a shift.

    Independent values of standard deviation sigma differ by sqrt(2) sigma in the root mean square, in either order;
    their value distributions are the same, so that W1 is 0 for a permutation and about `wasserstein_floor` for another
    sample. A shift by c moves no value past another: W1 = mean |difference| = c.

    Returns
    -------
    DataFrame : seed, beside, wasserstein, wasserstein_floor and mean_difference in units of sigma, relative_l2 without
        unit.
    """
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        tensor, other = torch.randn(2, n, generator=generator, dtype=torch.float64)
        order = torch.randperm(n, generator=generator)
        others = {
            "the same values in another order": tensor[order],
            "other values": other,
            "a shift by 0.1": tensor + 0.1,
        }
        for beside, values in others.items():
            distances = tensor_distance(tensor, values)
            rows.append({"seed": seed, "beside": beside, **{name: distances[name] for name in _COLUMNS}})
    return pd.DataFrame(rows)


def perturbed(
    numels: Sequence[int] = NUMELS, sizes: Sequence[float] = SIZES, seeds: Sequence[int] = SEEDS
) -> pd.DataFrame:
    """W1 between normal values and the same values plus normal noise, against the size of the noise.

    Noise smaller than the gaps between sorted values, about sigma / n, keeps their order: W1 = mean |difference|.
    Larger noise makes values pass each other, and sorting undoes most of it.

    Parameters
    ----------
    numels : values per tensor. sizes : standard deviation of the noise over that of the values.

    Returns
    -------
    DataFrame : n, size, seed, wasserstein, mean_difference (in units of sigma), kept (wasserstein / mean_difference).
    """
    rows = []
    for n in numels:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            tensor, noise = torch.randn(2, n, generator=generator, dtype=torch.float64)
            for size in sizes:
                distances = tensor_distance(tensor, tensor + size * noise)
                row = {"n": n, "size": size, "seed": seed} | {name: distances[name] for name in _COLUMNS[::2]}
                rows.append(row | {"kept": distances["wasserstein_ratio"]})
    return pd.DataFrame(rows)


def kept_in_training(model: pd.DataFrame) -> pd.DataFrame:
    """The rows of the weights' table that differ at all, with kept: wasserstein / mean_difference, between 0 and 1."""
    model = model[model["mean_difference"] > 0]
    return model.assign(kept=model["wasserstein"] / model["mean_difference"])
