"""Drift against the error that attention is given: does its size predict anything, does its bias?

Everything is in FP32 but the attention's own sites, which are rounded to a format of few fraction bits, to nearest,
stochastically or toward zero: the dose. All runs of a seed start from the same weights.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from fa_study.attention import flash_attention, golden_attention
from fa_study.experiments.compare import ROWS, SEEDS
from fa_study.experiments.errors import difference, error_rows
from fa_study.experiments.inputs import draw
from fa_study.experiments.law import MODES
from fa_study.experiments.sweep import Sweep
from fa_study.experiments.weights import whole_model
from fa_study.rounding import RoundingPolicy

FLASH, TILED, TWIN = "Flash against Baseline", "tiled against Baseline", "ulp twin"
STEPS = (50, 100, 200, 400)
_FORMATS = ("e8m4", "e8m7", "e8m10", "e8m14", "e8m18")
_PLACE = ["space", "step", "seed"]


@lru_cache(maxsize=1)
def _inputs(N: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V of a trained model and the golden output; what storing them in BF16 rounded off is put back at random.

    Otherwise a format as wide as BF16 would round its inputs for nothing.
    """
    generator = torch.Generator().manual_seed(0)

    def dithered(x: Tensor) -> Tensor:
        return x * (1 + 2**-9 * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    q, k, v = (dithered(x).float() for x in draw("trained", SEEDS, L=ROWS, S=N, D=64))
    return q, k, v, golden_attention(q, k, v).out


def dose_cell(*, format: str, rounding: str, N: int) -> pd.DataFrame:
    """Error of the attention that a dose run uses, on stored inputs of a trained model.

    Returns
    -------
    DataFrame : a row per sample, with `error_rows`' statistics and lean, the cosine between error and true output: -1
        if the error does nothing but shrink the output, about 0 if it has no bias.
    """
    q, k, v, golden = _inputs(N)
    policy, generator = RoundingPolicy.uniform(f"{format}:{rounding}"), torch.Generator().manual_seed(0)
    out = flash_attention(q, k, v, policy=policy, tile=(ROWS, 64), algorithm="fa2", generator=generator).out
    d = difference(out, golden)
    lean = torch.nn.functional.cosine_similarity(d.flatten(1), golden.double().flatten(1))
    return error_rows(d, SEEDS, lean=lean)


DOSE_ERRORS = Sweep(
    dose_cell,
    [{"format": f, "rounding": r, "N": 1024} for f, r in product(_FORMATS, MODES)],
    seeds="samples 0 to 19 of trained_qkv.parquet",
)


def _variant(format: str, rounding: str) -> str:
    """What `runs.arm` calls a dose."""
    return f"uniform {format}" + ("" if rounding == "nearest_even" else f":{rounding}")


def doses(deviations: pd.DataFrame, errors: pd.DataFrame) -> pd.DataFrame:
    """The RMS forward error that each arm gives its attention, against FP64.

    Measured by the probe inside the runs that were not nudged, over all layers and probed steps. The probe leaves
    stochastic roundings out: there, it is the error to nearest at the same width, times the ratio of both on the stored
    inputs.

    Parameters
    ----------
    deviations : table of `experiments.predictions.deviations`. errors : table of `dose_cell`.

    Returns
    -------
    DataFrame : variant ("" for Flash in FP32), rounding, dose, probed (True if measured in the runs). Arms without any
        of the two measurements are left out.
    """
    own = deviations[(deviations["precision"] == "fp32") & (deviations["twin"] == 0)]  # twins may be short
    flash = own[(own["arm"] == "flash") & (own["probed"] == "flash")].assign(variant="")
    tiled = own[own["probed"] == "tiled"].assign(variant=lambda x: x["arm"].astype(str))
    probed = pd.concat([flash, tiled]).groupby("variant")["rms"].agg(lambda rms: float((rms**2).mean() ** 0.5))
    stored = errors.groupby(["format", "rounding"])["rms"].median()
    rows = [{"variant": "", "rounding": "Flash", "dose": probed[""], "probed": True}] if "" in probed else []
    for format, rounding in stored.index:
        variant, nearest = _variant(format, rounding), _variant(format, "nearest_even")
        if variant in probed:
            rows.append({"variant": variant, "rounding": rounding, "dose": probed[variant], "probed": True})
        elif nearest in probed:
            ratio = stored[format, rounding] / stored[format, "nearest_even"]
            rows.append({"variant": variant, "rounding": rounding, "dose": probed[nearest] * ratio, "probed": False})
    return pd.DataFrame(rows, columns=["variant", "rounding", "dose", "probed"])


def drifts(weights: pd.DataFrame, predictions: pd.DataFrame) -> pd.DataFrame:
    """Distance from Baseline in FP32: kind, variant, space, step, seed, drift; a row per snapshot that differs.

    space "weights": relative L2 distance of all weights pooled; "predictions": RMS difference on the held-out batch, in
    units of the noise's standard deviation.
    """
    kinds = (FLASH, TILED, TWIN)
    model = pd.concat([whole_model(weights, kind) for kind in kinds])
    predicted = predictions[predictions["kind"].isin(kinds)]
    rows = pd.concat(
        [
            model.assign(space="weights", drift=model["relative_l2"]),
            predicted.assign(space="predictions", drift=predicted["rms"]),
        ]
    )
    rows = rows.astype({name: str for name in ("kind", "variant", "precision")} | {"drift": float})
    forked = rows["variant"].str.startswith("from step")
    rows = rows[(rows["precision"] == "fp32") & (rows["drift"] > 0) & ~forked]
    return rows[["kind", "variant", *_PLACE, "drift"]].reset_index(drop=True)


def twin_scale(rows: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """Where the drift of ulp twins lies, and the factor within which one more of them would, by space, step and seed.

    exp(t_f s sqrt(1 + 1 / n)) about the geometric mean of a seed's n twins: a prediction interval. s is the standard
    deviation of the logarithms about what seed and kind explain, with f degrees of freedom. Flash in FP32 counts beside
    the twins: it perturbs training by about as little, and with one twin per seed it is what tells a seed's own growth
    from the scatter about it.

    Parameters
    ----------
    rows : `drifts`, of twins and Flash.

    Returns
    -------
    DataFrame : space, step, seed, twin (geometric mean), twins (n), factor (NaN if f is 0).
    """
    rows = rows[rows["kind"].isin((TWIN, FLASH))].assign(log=lambda x: np.log(x["drift"]))
    scale = rows[rows["kind"] == TWIN].groupby(_PLACE)["log"].agg(twin="mean", twins="count").reset_index()
    spreads = {}
    for place, part in rows.groupby(["space", "step"]):
        explained = np.column_stack([*(part["seed"] == seed for seed in set(part["seed"])), part["kind"] == FLASH])
        fit, _, rank, _ = np.linalg.lstsq(explained.astype(float), part["log"], rcond=None)
        freedom = len(part) - int(rank)
        left = np.square(part["log"] - explained @ fit).sum()
        spreads[place] = stats.t.ppf((1 + confidence) / 2, freedom) * (left / freedom) ** 0.5 if freedom else np.nan
    spread = pd.Series([spreads[place] for place in zip(scale["space"], scale["step"])], dtype=float)
    return scale.assign(twin=np.exp(scale["twin"]), factor=np.exp(spread * np.sqrt(1 + 1 / scale["twins"])))


def dose_response(weights: pd.DataFrame, predictions: pd.DataFrame, given: pd.DataFrame) -> pd.DataFrame:
    """The drift of every arm over that of the ulp twins of its seed, beside its dose.

    Parameters
    ----------
    given : `doses`.

    Returns
    -------
    DataFrame : variant, rounding, dose, probed, space, step, seed, drift, twin, twins, factor (`twin_scale`), ratio;
        seeds without a twin or without a tiled arm are left out.
    """
    rows = drifts(weights, predictions)
    scale = twin_scale(rows)
    arms = rows[(rows["kind"] != TWIN) & rows["seed"].isin(rows.loc[rows["kind"] == TILED, "seed"])]
    arms = arms.drop(columns="kind").merge(given, on="variant").merge(scale, on=_PLACE)
    return arms.assign(ratio=arms["drift"] / arms["twin"])


def rank_test(response: pd.DataFrame, level: float = 0.05) -> pd.DataFrame:
    """Does drift rise with dose? Kendall's rank correlation over the arms, whose seeds count by their median.

    Returns
    -------
    DataFrame : space, step, arms, seeds, tau, p (exact, that arms in random order have a tau as large), rises (p <
        level), exponent (of drift ~ dose^exponent, by least squares), exceeds (the smallest dose from which on every
        larger one drifts beyond the twins' factor; NaN if the largest does not, or the factor is unknown).
    """
    rows = []
    for (space, step), part in response.groupby(["space", "step"]):
        arms = part.groupby("variant")[["dose", "ratio", "factor"]].median().sort_values("dose")
        if len(arms) < 3:
            continue
        trend = stats.kendalltau(arms["dose"], arms["ratio"], alternative="greater")
        beyond = (arms["ratio"] > arms["factor"]).to_numpy()
        kept = arms["dose"][beyond[::-1].cumprod()[::-1].astype(bool)]
        rows.append(
            {
                "space": space,
                "step": step,
                "arms": len(arms),
                "seeds": part["seed"].nunique(),
                "tau": trend.statistic,
                "p": trend.pvalue,
                "rises": trend.pvalue < level,
                "exponent": np.polyfit(np.log(arms["dose"]), np.log(arms["ratio"]), 1)[0],
                "exceeds": kept.min(),
            }
        )
    return pd.DataFrame(rows)


def beside_nearest(response: pd.DataFrame) -> pd.DataFrame:
    """What another rounding drifts, over what rounding to nearest drifts at the same forward error.

    The latter is interpolated between the doses to nearest of the same seed, in logarithms; arms with a larger or
    smaller error than all of these are left out.

    Returns
    -------
    DataFrame : variant, rounding, space, step, seed, excess, factor (`twin_scale`).
    """
    rows = []
    for place, part in response.groupby(_PLACE):
        nearest = part[part["rounding"] == "nearest_even"].sort_values("dose")
        for arm in part[part["rounding"].isin(set(MODES) - {"nearest_even"})].itertuples():
            if len(nearest) >= 2 and nearest["dose"].iloc[0] <= arm.dose <= nearest["dose"].iloc[-1]:
                expected = np.exp(np.interp(np.log(arm.dose), np.log(nearest["dose"]), np.log(nearest["drift"])))
                row = {"variant": arm.variant, "rounding": arm.rounding, **dict(zip(_PLACE, place))}
                rows.append(row | {"excess": arm.drift / expected, "factor": arm.factor})
    return pd.DataFrame(rows, columns=["variant", "rounding", *_PLACE, "excess", "factor"])
