"""Does the loss jump more often with Flash? Jumps are counted in each run and compared seed by seed, by an exact test.

The question was asked after the runs had been made: the definition of a jump is ours, and other thresholds are told
beside it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pandas as pd
from scipy import stats

from fa_study.experiments.matter import PAIRS, RUN, one_arm, plain_losses

FACTOR = 1.3
FACTORS = (1.2, 1.3, 1.5)
AROUND = 5
START = 500
LEVEL = 0.05
POOLED = "all"
_DRAWS, _STEP, _MOST = 500, 0.05, 5.0


def beside_surroundings(losses: pd.DataFrame) -> pd.DataFrame:
    """Held-out loss of each snapshot over the median of the `AROUND` snapshots around it, its own among them.

    At the ends of a run fewer snapshots lie around.

    Returns
    -------
    DataFrame : arm, precision, seed, twin, step, ratio; from step `START` on. One run of Flash and two of Baseline (the
        run itself and its first ulp twin) for each precision and seed; no other twin, fork or control.
    """
    rows = plain_losses(losses)
    kept = {side for pair in PAIRS.values() for side in pair}
    rows = rows[[side in kept for side in zip(rows["arm"], rows["twin"])]].astype({"held_out_loss": float})
    around = rows.groupby(RUN)["held_out_loss"].transform(
        lambda loss: loss.rolling(AROUND, center=True, min_periods=1).median()
    )
    return rows.assign(ratio=rows["held_out_loss"] / around).loc[rows["step"] >= START, [*RUN, "step", "ratio"]]


def sign_flip_p(differences: np.ndarray) -> np.ndarray:
    """Exact two-sided p of the sums of whole-numbered differences, if each of them may as well have the other sign.

    The p of a sum is the share of all 2^n choices of the n signs that lead to a sum at least as far from 0. All choices
    are counted, by adding one difference after the other to the distribution of the sum.

    Parameters
    ----------
    differences : (draws, n) whole numbers, a test per row.

    Returns
    -------
    ndarray : (draws,)

    Raises
    ------
    ValueError : a difference that is not whole.
    """
    differences = np.atleast_2d(differences)
    if not np.array_equal(differences, np.round(differences)):
        raise ValueError(f"the test counts jumps and takes whole numbers, got {differences.tolist()}")
    sizes = np.abs(differences).astype(int)
    reach = int(sizes.sum(1).max(initial=0))
    totals = np.arange(-reach, reach + 1)
    share = np.broadcast_to((totals == 0).astype(float), (len(sizes), len(totals)))
    places = np.arange(len(totals))
    for size in sizes.T[..., None]:  # nothing lies beyond the reach, so that what comes round the end is 0
        down, up = (np.take_along_axis(share, (places + sign * size) % len(totals), 1) for sign in (1, -1))
        share = (down + up) / 2
    return (share * (np.abs(totals) >= np.abs(differences.sum(1, keepdims=True)))).sum(1)


@lru_cache
def detectable_excess(rate: float, runs: tuple[int, ...]) -> float:
    """The smallest excess of jumps per run that `sign_flip_p` finds at p < `LEVEL` in 4 cases of 5.

    Counts are drawn from Poisson distributions, `rate` per run on one side and rate + excess on the other; always the
    same draws.

    Parameters
    ----------
    rate : jumps per run of the other side. runs : runs of each seed on either side.

    Returns
    -------
    float : in steps of 0.05; infinite if even 5 more jumps per run would not be found, as with five seeds or fewer.
    """
    drawn = np.random.default_rng(0).random((2, _DRAWS, len(runs)))
    theirs = stats.poisson.ppf(drawn[0], rate * np.asarray(runs))

    def found(steps: int) -> bool:
        ours = stats.poisson.ppf(drawn[1], (rate + steps * _STEP) * np.asarray(runs))
        return bool((sign_flip_p(ours - theirs) < LEVEL).mean() >= 0.8)

    low, high = 0, round(_MOST / _STEP)
    if not found(high):
        return float("inf")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return round(high * _STEP, 2)


def jump_tests(losses: pd.DataFrame, factor: float = FACTOR) -> pd.DataFrame:
    """Jumps of Flash and of the ulp twin beside those of Baseline, with the test of the difference over the seeds.

    A jump is a snapshot whose loss is more than `factor` times the median around it (`beside_surroundings`).

    Returns
    -------
    DataFrame : a row per (kind, precision): seeds, runs (on either side), ours, theirs (jumps), p (`sign_flip_p` of the
        differences by seed), least (the smallest p that differences of these sizes could have given), detectable
        (`detectable_excess`, jumps per run). precision "all" takes the precisions of one seed together.

    Raises
    ------
    ValueError : a factor of 1 or less.
    """
    if factor <= 1:
        raise ValueError(f"a jump goes above its surroundings: factor must be more than 1, got {factor:g}")
    ratios = beside_surroundings(losses)
    counts = ratios.assign(jumps=ratios["ratio"] > factor).groupby(RUN)["jumps"].sum()
    rows = []
    for kind, (ours, theirs) in PAIRS.items():
        parts = {}
        for precision in sorted(set(counts.index.get_level_values("precision"))):
            pair = {"ours": one_arm(counts, *ours, precision), "theirs": one_arm(counts, *theirs, precision)}
            parts[precision] = pd.DataFrame(pair).dropna().assign(runs=1)
        parts = {precision: part for precision, part in parts.items() if len(part) >= 2}
        if len(parts) > 1:
            parts[POOLED] = pd.concat(parts.values()).groupby(level="seed").sum()
        for precision, part in parts.items():
            difference = (part["ours"] - part["theirs"]).to_numpy()
            totals = part.sum().astype(int)
            row = {"kind": kind, "precision": precision, "seeds": len(part)} | totals.to_dict()
            row["p"] = float(sign_flip_p(difference)[0])
            row["least"] = float(sign_flip_p(np.abs(difference))[0])
            row["detectable"] = detectable_excess(totals["theirs"] / totals["runs"], tuple(part["runs"]))
            rows.append(row)
    columns = ["kind", "precision", "seeds", "runs", "ours", "theirs", "p", "least", "detectable"]
    return pd.DataFrame(rows, columns=columns)
