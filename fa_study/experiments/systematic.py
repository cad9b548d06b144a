"""Does a change of attention move the weights to somewhere of its own, or only as far as any perturbation does?

Several twins of one initialisation, trained with Flash (or with an error injected into attention) and with Baseline on
the same batches. Twins scatter; what all Flash twins have in common, against all Baseline twins, is the systematic
effect of Flash.

n twins per arm, P namings.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from fa_study.distance.aggregate import ZERO_GRADIENT
from fa_study.experiments.predictions import prediction
from fa_study.experiments.runs import arm, longest_runs
from fa_study.snapshots import load_weights, snapshot_steps

_RUN = ["arm", "twin"]
_OTHER = ["other_arm", "other_twin"]


def twin_families(folder: Path) -> dict[str, dict[tuple[str, int], Path]]:
    """{family: {(arm, twin): run folder}} of runs that differ in their attention and nudge alone, two per arm or more.

    Runs whose weights were dropped are left out.
    """
    families: dict[str, dict[tuple[str, int], Path]] = defaultdict(dict)
    for run, settings in longest_runs(folder).items():
        name, twin = arm(settings), settings["twin"]
        if not settings["twin_step"] and (run / "weights").exists():
            families[repr(settings | {"attn": None, "twin": None})][name, twin] = run
    kept = {}
    for members in families.values():
        per_arm = pd.Series([name for name, _ in members]).value_counts()
        members = {key: run for key, run in sorted(members.items()) if per_arm[key[0]] >= 2}
        if ("baseline", 0) in members and len({name for name, _ in members}) >= 2:
            kept[members["baseline", 0].name.removeprefix("baseline-")] = members
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
        steps = {key: set(snapshot_steps(run)) for key, run in members.items()}
        for step, (space, flatten) in itertools.product(
            sorted(steps["baseline", 0]), (("weights", weight_vector), ("predictions", prediction_vector))
        ):
            vectors = {key: flatten(run, step) for key, run in members.items() if step in steps[key]}
            vectors = {key: vector for key, vector in vectors.items() if vector is not None}
            if ("baseline", 0) not in vectors:
                continue
            displacements = np.stack(list(vectors.values())) - vectors["baseline", 0]
            gram = displacements @ displacements.T
            for (i, first), (j, second) in itertools.combinations_with_replacement(enumerate(vectors), 2):
                rows.append((family, precision, int(seed), space, step, *first, *second, gram[i, j]))
    return pd.DataFrame(rows, columns=["run", "precision", "seed", "space", "step", *_RUN, *_OTHER, "inner"])


def weight_vector(run: Path, step: int) -> np.ndarray:
    """All weights of a run at a step, in float64, without the parameters whose exact gradient is zero."""
    weights = load_weights(run, step)
    names = sorted(name for name in weights if not re.search(ZERO_GRADIENT, name))
    return np.concatenate([weights[name].double().numpy().ravel() for name in names])


def prediction_vector(run: Path, step: int) -> np.ndarray | None:
    """The predictions of a run at a step, in float64, or None if it kept none."""
    predicted = prediction(run, step)
    return None if predicted is None else predicted.numpy().ravel()


def paired_gram(rows: pd.DataFrame, *arms: str) -> np.ndarray:
    """Inner products (k n, k n) of the differences d = twin i of an arm - Baseline twin i, arm after arm of the k arms.

    rows : of `inner_products`, of one family, space and step. The n twins are those that the arms and Baseline have.
    """
    swapped = dict(zip(_RUN + _OTHER, _OTHER + _RUN))
    both = pd.concat([rows, rows.rename(columns=swapped)]).drop_duplicates(list(swapped))
    gram = both.pivot(index=_RUN, columns=_OTHER, values="inner")
    twins = sorted(set.intersection(*(set(gram.loc[arm].index) for arm in (*arms, "baseline"))))
    moved, origin = ([(arm, twin) for arm in names for twin in twins] for names in (arms, ["baseline"] * len(arms)))
    return sum(
        a * b * gram.loc[first, second].to_numpy(float)
        for (first, a), (second, b) in itertools.product(((moved, 1), (origin, -1)), repeat=2)
    )


def mean_effect(gram: np.ndarray, signs: np.ndarray, other_signs: np.ndarray | None = None) -> np.ndarray:
    """Mean inner product of the differences of two distinct twins: mean over i != j of s_i t_j <d_i, e_j>.

    An unbiased estimate of <E d, E e>, what all differences have in common: the noise of one twin is independent of
    that of another, so that only what they share remains. Negative values are noise about 0.

    Parameters
    ----------
    gram : (n, n) inner products <d_i, e_j>. signs : (P, n) s, -1 where an arm and Baseline change their names.
    other_signs : t, the same for e; default: s, as e is d.

    Returns
    -------
    ndarray : (P,) in the square of the vectors' unit.
    """
    count, other_signs = len(gram), signs if other_signs is None else other_signs
    own = (signs * other_signs * np.diag(gram)).sum(-1)
    return (((signs @ gram) * other_signs).sum(-1) - own) / (count * (count - 1))


def systematic_effect(
    table: pd.DataFrame, arm: str = "flash", other: str | None = None, *, level: float = 0.01
) -> pd.DataFrame:
    """The systematic effect of an arm with an exact permutation test, by family, space and step.

    Under the hypothesis that Flash is one more perturbation, the names of two runs that start from the same twin may be
    exchanged; all 2^n ways of doing so are counted (256 for 8 twins, so that p is at least 2/256). Flash twin k and
    Baseline twin k share their nudge, and with it their noise in the first steps: hence the pairs.

    With `other`, what the effects of two arms have in common: zero if they lead to different places, whether or not
    each has an effect of its own. Here the names of `arm` alone are exchanged.

    Parameters
    ----------
    table : `inner_products`. arm, other : as `runs.arm` calls them.

    Returns
    -------
    DataFrame : run, precision, seed, space, step, twins (n), share (the systematic part of the mean squared distance
        between Flash twin k and Baseline twin k; for two arms, over the geometric mean of their distances), p (share of
        the namings whose effect is at least as large), detectable (the share that has p < level in 4 cases of 5, if it
        scatters as the namings do). Steps at which no twin differs, or of which there are no two twins, are left out.
    """
    names, arms = ["run", "precision", "seed", "space", "step"], [arm] if other is None else [arm, other]
    rows, kept = [], ["baseline", *arms]
    for keys, part in table[table["arm"].isin(kept) & table["other_arm"].isin(kept)].groupby(names, observed=True):
        gram = paired_gram(part, *arms) if set(arms) <= set(part["arm"]) else np.empty((0, 0))
        count = len(gram) // len(arms)
        if count < 2:
            continue
        distances = np.diag(gram).reshape(len(arms), count).mean(1)
        own = [part[part["arm"].isin(("baseline", a)) & part["other_arm"].isin(("baseline", a))] for a in arms]
        # Stored in FP32: a distance of exactly 0 comes back as rounding noise.
        if any(distance <= 1e-6 * products["inner"].abs().max() for distance, products in zip(distances, own)):
            continue
        signs = np.array(list(itertools.product((1, -1), repeat=count)))
        fixed = None if other is None else np.ones(count)
        distance = distances.prod() ** (1 / len(arms))
        null = mean_effect(gram[:count, -count:], signs, fixed)
        # Equal up to rounding counts as "at least as large": the true naming, the first one, is one of them.
        row = dict(zip(names, keys)) | {"twins": count, "share": null[0] / distance}
        row["p"] = float((null >= null[0] - 1e-9 * distance).mean())
        seen = np.quantile(null, 1 - level) + stats.norm.ppf(0.8) * null.std()
        rows.append(row | {"detectable": float(seen) / distance})
    return pd.DataFrame(rows)
