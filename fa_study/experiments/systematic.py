"""Does Flash Attention move the weights to somewhere of its own, or only as far as any perturbation does?

Several twins of one initialisation, trained with Flash and with Baseline on the same batches. Twins scatter; what all
Flash twins have in common, against all Baseline twins, is the systematic effect of Flash.

n twins per arm, P namings.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from fa_study.distance.aggregate import ZERO_GRADIENT
from fa_study.experiments.predictions import prediction
from fa_study.experiments.runs import runs_in
from fa_study.snapshots import load_weights, snapshot_steps

ARMS = ("flash", "baseline")


def twin_families(folder: Path) -> dict[str, dict[tuple[str, int], Path]]:
    """{family: {(arm, twin): run folder}} of runs that differ in their arm and nudge alone, two per arm or more.

    Runs whose weights were dropped are left out.
    """
    families: dict[str, dict[tuple[str, int], Path]] = defaultdict(dict)
    for run, settings in runs_in(folder).items():
        name, twin = settings.pop("attn")["name"], settings.pop("twin")
        if name in ARMS and not settings["twin_step"] and (run / "weights").exists():
            families[repr(settings)][name, twin] = run
    kept = {}
    for members in families.values():
        if all(sum(name == arm for name, _ in members) >= 2 for arm in ARMS) and ("baseline", 0) in members:
            kept[members["baseline", 0].name.removeprefix("baseline-")] = dict(sorted(members.items()))
    return kept


def inner_products(folder: Path) -> pd.DataFrame:
    """Inner products between the twins' displacements, from which every mean and distance of theirs follows.

    A displacement is a run's weights (or predictions) minus those of the Baseline run without a nudge, at the same
    step. Parameters whose exact gradient is zero are left out.

    Returns
    -------
    DataFrame : a row per (run, precision, seed, space, step, arm, twin, other_arm, other_twin): inner, the inner
        product of the two displacements; run names the family, space is weights or predictions.
    """
    rows = []
    for family, members in twin_families(folder).items():
        precision, seed = re.match(r"(\w+)-.*?-s(\d+)", family).groups()
        steps = sorted(set.intersection(*(set(snapshot_steps(run)) for run in members.values())))
        for step, (space, flatten) in itertools.product(
            steps, (("weights", weight_vector), ("predictions", prediction_vector))
        ):
            vectors = [flatten(run, step) for run in members.values()]
            if any(vector is None for vector in vectors):
                continue
            displacements = np.stack(vectors) - vectors[list(members).index(("baseline", 0))]
            gram = displacements @ displacements.T
            for (i, first), (j, second) in itertools.combinations_with_replacement(enumerate(members), 2):
                rows.append((family, precision, int(seed), space, step, *first, *second, gram[i, j]))
    names = ["run", "precision", "seed", "space", "step", "arm", "twin", "other_arm", "other_twin", "inner"]
    return pd.DataFrame(rows, columns=names)


def weight_vector(run: Path, step: int) -> np.ndarray:
    """All weights of a run at a step, in float64, without the parameters whose exact gradient is zero."""
    weights = load_weights(run, step)
    names = sorted(name for name in weights if not re.search(ZERO_GRADIENT, name))
    return np.concatenate([weights[name].double().numpy().ravel() for name in names])


def prediction_vector(run: Path, step: int) -> np.ndarray | None:
    """The predictions of a run at a step, in float64, or None if it kept none."""
    predicted = prediction(run, step)
    return None if predicted is None else predicted.numpy().ravel()


def paired_gram(rows: pd.DataFrame) -> np.ndarray:
    """Inner products (n, n) of the differences d_k = Flash twin k - Baseline twin k, from rows of `inner_products`."""
    swapped = {"arm": "other_arm", "other_arm": "arm", "twin": "other_twin", "other_twin": "twin"}
    both = pd.concat([rows, rows.rename(columns=swapped)])
    inner = both.drop_duplicates(list(swapped)).set_index(list(swapped))["inner"].to_dict()
    twins = sorted({key[2] for key in inner if key[0] == "flash"} & {key[2] for key in inner if key[0] == "baseline"})

    def product(i: int, j: int) -> float:
        signs = itertools.product((("flash", 1), ("baseline", -1)), repeat=2)
        return sum(a * b * inner[first, second, i, j] for (first, a), (second, b) in signs)

    return np.array([[product(i, j) for j in twins] for i in twins])


def mean_effect(gram: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Mean inner product of the differences of two distinct twins: mean over i != j of s_i s_j <d_i, d_j>.

    An unbiased estimate of |E d|^2, what all differences have in common: the noise of one twin is independent of that
    of another, so that only what they share remains. Negative values are noise about 0.

    Parameters
    ----------
    gram : (n, n) inner products <d_i, d_j>. signs : (P, n), -1 where Flash and Baseline change their names.

    Returns
    -------
    ndarray : (P,) in the square of the vectors' unit.
    """
    count = len(gram)
    return (((signs @ gram) * signs).sum(-1) - np.trace(gram)) / (count * (count - 1))


def systematic_effect(table: pd.DataFrame) -> pd.DataFrame:
    """The systematic effect of Flash with an exact permutation test, by family, space and step.

    Under the hypothesis that Flash is one more perturbation, the names of two runs that start from the same twin may be
    exchanged; all 2^n ways of doing so are counted (256 for 8 twins, so that p is at least 2/256). Flash twin k and
    Baseline twin k share their nudge, and with it their noise in the first steps: hence the pairs.

    Returns
    -------
    DataFrame : run, precision, seed, space, step, twins (n), share (the systematic part of the mean squared distance
        between Flash twin k and Baseline twin k), p (share of the namings whose effect is at least as large),
        detectable (the share that would have had p = 0.05). Steps at which no twin differs are left out.
    """
    rows = []
    for keys, part in table.groupby(["run", "precision", "seed", "space", "step"], observed=True):
        gram = paired_gram(part)
        distance = np.trace(gram) / len(gram)
        # Stored in FP32: a distance of exactly 0 comes back as rounding noise.
        if distance <= 1e-6 * part["inner"].abs().max():
            continue
        signs = np.array(list(itertools.product((1, -1), repeat=len(gram))))
        effect, null = mean_effect(gram, signs[:1])[0], mean_effect(gram, signs)
        # Equal up to rounding counts as "at least as large": the true naming is one of them.
        p = float((null >= effect - 1e-9 * distance).mean())
        row = dict(zip(("run", "precision", "seed", "space", "step"), keys))
        row |= {"twins": len(gram), "share": effect / distance, "p": p}
        rows.append(row | {"detectable": float(np.quantile(null, 0.95)) / distance})
    return pd.DataFrame(rows)
