"""Which rounding is to blame? The error of every subset of seven sites in BF16, and each site's Shapley value.

The other sites are in FP32; the maximum is not among the seven because rounding it cancels exactly. T = N / Bc = 64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations, product

import pandas as pd
import torch
from torch import Tensor

from fa_study.attention import baseline_attention, flash_attention, golden_attention
from fa_study.experiments.compare import ROWS, SEEDS, rms_per_seed
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.inputs import draw
from fa_study.experiments.sweep import Sweep
from fa_study.formats import BF16, round_to
from fa_study.rounding import RoundingPolicy

SITES = ("scores", "exponentials", "probabilities", "sum", "rescale", "accumulator", "output")
ALGORITHMS = ("fa1", "fa2", "fa4", "Baseline")
N, Bc = 1024, 16
_SUBSETS = ["+".join(subset) for size in range(len(SITES) + 1) for subset in combinations(SITES, size)]


@lru_cache(maxsize=1)
def _inputs(distribution: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V in BF16 and the golden output; kept, because many cells in a row share them."""
    q, k, v = (round_to(x, BF16).float() for x in draw(distribution, SEEDS, L=ROWS, S=N, D=64))
    return q, k, v, golden_attention(q, k, v).out


def attribution_cell(*, distribution: str, algorithm: str, sites: str, stochastic: str) -> pd.DataFrame:
    """The error with the named sites in BF16.

    Parameters
    ----------
    algorithm : "fa1", "fa2", "fa4" or "Baseline".
    sites : names joined by "+"; "" for none.
    stochastic : one of these sites, which rounds stochastically instead of to nearest; "" for none.
    """
    rounded = sites.split("+") if sites else []
    if unknown := set(rounded) - set(SITES):
        raise ValueError(f"unknown sites {sorted(unknown)}: use {', '.join(SITES)}")
    roundings = {site: "bf16:stochastic" if site == stochastic else "bf16" for site in rounded}
    policy = RoundingPolicy(**roundings)
    q, k, v, golden = _inputs(distribution)
    generator = torch.Generator().manual_seed(0)
    if algorithm == "Baseline":
        result = baseline_attention(q, k, v, policy=policy, generator=generator)
    else:
        result = flash_attention(q, k, v, policy=policy, algorithm=algorithm, tile=(ROWS, Bc), generator=generator)
    unit = [BF16.unit_roundoff * rms for rms in rms_per_seed(golden)]
    return error_rows(difference(result.out, golden), SEEDS, unit=unit)


def _cells() -> list[dict]:
    everything = "+".join(SITES)
    choices = [(subset, "") for subset in _SUBSETS]
    choices += [(site, site) for site in SITES] + [(everything, site) for site in SITES]
    return [
        {"distribution": d, "algorithm": a, "sites": sites, "stochastic": stochastic}
        for d, a, (sites, stochastic) in product(("normal", "uniform"), ALGORITHMS, choices)
    ]


ATTRIBUTION = Sweep(attribution_cell, _cells())


def shapley_values(errors: dict[frozenset[str], float]) -> dict[str, float]:
    """Each site's Shapley value: its mean effect on the error over all orders in which sites could be switched on.

    ``phi_i = sum over subsets S without i of |S|! (n - |S| - 1)! / n! (errors[S + i] - errors[S])``; they add up to the
    error of all sites minus that of none.

    Parameters
    ----------
    errors : the mean squared error of every subset of the sites.
    """
    sites = frozenset().union(*errors)
    n = len(sites)
    if len(errors) != 2**n:
        raise ValueError(f"Shapley values of {n} sites need all {2**n} subsets, got {len(errors)}")
    values = dict.fromkeys(sorted(sites), 0.0)
    for subset, error in errors.items():
        for site in sites - subset:
            weight = math.factorial(len(subset)) * math.factorial(n - len(subset) - 1) / math.factorial(n)
            values[site] += weight * (errors[subset | {site}] - error)
    return values


def _subset(sites: str) -> frozenset[str]:
    return frozenset(sites.split("+")) if sites else frozenset()


def shapley_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Shapley values of the mean squared error in units of (u rms)^2, per distribution, algorithm, seed and site."""
    nearest = frame[frame["stochastic"] == ""].assign(mse=lambda f: (f["rms"] / f["unit"]) ** 2)
    rows = []
    for (d, a, seed), group in nearest.groupby(["distribution", "algorithm", "seed"]):
        errors = {_subset(sites): mse for sites, mse in zip(group["sites"], group["mse"])}
        values = shapley_values(errors)
        total = errors[frozenset(SITES)] - errors[frozenset()]
        rows += [
            {
                "distribution": d,
                "algorithm": a,
                "seed": seed,
                "site": site,
                "shapley": values[site],
                "share": values[site] / total,
            }
            for site in SITES
        ]
    return pd.DataFrame(rows)


def single_sites(frame: pd.DataFrame) -> pd.DataFrame:
    """Per site and seed: the RMS error of the site alone, of all but it, and of all, in units of u rms."""
    keys = ["distribution", "algorithm", "seed"]
    nearest = frame[frame["stochastic"] == ""].assign(
        error=lambda f: f["rms"] / f["unit"], signed=lambda f: f["mean"] / f["unit"]
    )
    parts = []
    for site in SITES:
        others = "+".join(s for s in SITES if s != site)
        alone = nearest[nearest["sites"] == site].set_index(keys)
        without = nearest[nearest["sites"] == others].set_index(keys)
        parts.append(
            pd.DataFrame(
                {"alone": alone["error"], "signed alone": alone["signed"], "all but": without["error"]}
            ).assign(site=site)
        )
    everything = nearest[nearest["sites"] == "+".join(SITES)].set_index(keys)["error"].rename("all")
    return pd.concat(parts).join(everything).reset_index()


def stochastic_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """RMS error with one site stochastic over that with it to nearest, per site and seed, alone and among all.

    Unbiased errors have twice the variance when rounded stochastically: a ratio of sqrt(2) for the site alone. A ratio
    below 1 says that the site's error to nearest leans to one side.
    """
    keys = ["distribution", "algorithm", "sites", "seed"]
    nearest = frame.loc[frame["stochastic"] == "", [*keys, "rms", "mean"]]
    other = frame[frame["stochastic"] != ""].merge(nearest, on=keys, suffixes=("", "_nearest"))
    return other.assign(
        site=other["stochastic"],
        context=["alone" if sites == site else "all" for sites, site in zip(other["sites"], other["stochastic"])],
        ratio=other["rms"] / other["rms_nearest"],
        signed=other["mean"] / other["unit"],
        signed_nearest=other["mean_nearest"] / other["unit"],
    )[["distribution", "algorithm", "context", "site", "seed", "ratio", "signed", "signed_nearest"]]


def cheapest_policies(frame: pd.DataFrame, *, margin: float = 1.05) -> pd.DataFrame:
    """The fewest sites that must be in FP32 for Flash to be as good as a goal, per distribution and algorithm.

    Goals: "Baseline", all seven sites of Baseline in BF16; "FP32 within the output", Flash with the output alone in
    BF16. As good: the median over the seeds of the RMS error is at most `margin` times the goal's.

    Returns
    -------
    DataFrame : a row per solution with the fewest sites in FP32, with its error over the goal's.
    """
    medians = frame[frame["stochastic"] == ""].groupby(["distribution", "algorithm", "sites"])["rms"].median()
    rows = []
    for distribution, algorithm in product(sorted(set(frame["distribution"])), ("fa1", "fa2", "fa4")):
        errors = medians[distribution, algorithm]
        goals = {
            "Baseline": medians[distribution, "Baseline", "+".join(SITES)],
            "FP32 within the output": errors["output"],
        }
        for goal, bound in goals.items():
            # The output's own rounding stays: a result in BF16 is what is asked for.
            good = [(s, e) for s, e in errors.items() if e <= margin * bound and "output" in s.split("+")]
            most = max(len(s.split("+")) for s, _ in good)
            rows += [
                {
                    "distribution": distribution,
                    "algorithm": algorithm,
                    "goal": goal,
                    "in FP32": ", ".join(x for x in SITES if x not in s.split("+")) or "none",
                    "error / goal": e / bound,
                }
                for s, e in good
                if len(s.split("+")) == most
            ]
    return pd.DataFrame(rows)
