"""Does Flash Attention move the weights to somewhere of its own, or only as far as any perturbation does?

Several twins of one initialisation, trained with Flash and with Baseline on the same batches. Twins scatter; what all
Flash twins have in common, against all Baseline twins, is the systematic effect of Flash.

n twins per arm, N = 2n runs, P labellings.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from fa_study.aggregate import ZERO_GRADIENT
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
        for step, (space, flatten) in itertools.product(steps, (("weights", _weights), ("predictions", _predictions))):
            vectors = [flatten(run, step) for run in members.values()]
            if any(vector is None for vector in vectors):
                continue
            displacements = np.stack(vectors) - vectors[list(members).index(("baseline", 0))]
            gram = displacements @ displacements.T
            for (i, first), (j, second) in itertools.combinations_with_replacement(enumerate(members), 2):
                rows.append((family, precision, int(seed), space, step, *first, *second, gram[i, j]))
    names = ["run", "precision", "seed", "space", "step", "arm", "twin", "other_arm", "other_twin", "inner"]
    return pd.DataFrame(rows, columns=names)


def _weights(run: Path, step: int) -> np.ndarray:
    weights = load_weights(run, step)
    names = sorted(name for name in weights if not re.search(ZERO_GRADIENT, name))
    return np.concatenate([weights[name].double().numpy().ravel() for name in names])


def _predictions(run: Path, step: int) -> np.ndarray | None:
    predicted = prediction(run, step)
    return None if predicted is None else predicted.numpy().ravel()


def gram_matrix(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """(gram (N, N), flash (N,) boolean) of one family, space and step of `inner_products`."""
    square = rows.rename(columns={"arm": "other_arm", "other_arm": "arm", "twin": "other_twin", "other_twin": "twin"})
    table = pd.concat([rows, square]).drop_duplicates(["arm", "twin", "other_arm", "other_twin"])
    gram = table.pivot(index=["arm", "twin"], columns=["other_arm", "other_twin"], values="inner")
    return gram.to_numpy(float), gram.index.get_level_values("arm").to_numpy() == "flash"


def mean_effect(gram: np.ndarray, flash: np.ndarray) -> np.ndarray:
    """Mean inner product of two differences (Flash minus Baseline) over distinct pairs: no twin occurs twice.

    mean over i != j, k != l of <F_i - B_k, F_j - B_l>, an unbiased estimate of |E F - E B|^2: the noise of one twin
    is independent of that of another, so that only what they share remains. Negative values are noise about 0.

    Parameters
    ----------
    gram : (N, N) inner products. flash : (P, N) boolean, which runs are called Flash in each labelling.

    Returns
    -------
    ndarray : (P,) in the square of the vectors' unit.
    """
    own = np.diag(gram)

    def within(chosen: np.ndarray) -> np.ndarray:
        count = chosen.sum(-1)
        return (((chosen @ gram) * chosen).sum(-1) - chosen @ own) / (count * (count - 1))

    ours, others = flash.astype(float), 1.0 - flash
    across = ((ours @ gram) * others).sum(-1) / (ours.sum(-1) * others.sum(-1))
    return within(ours) + within(others) - 2 * across


def systematic_effect(table: pd.DataFrame) -> pd.DataFrame:
    """The systematic effect of Flash with an exact permutation test, by family, space and step.

    Under the hypothesis that Flash is one more perturbation, every labelling of the N runs with n times "flash" is as
    likely as the true one; all of them are counted (12,870 for 8 against 8).

    Returns
    -------
    DataFrame : run, precision, seed, space, step, twins (n of the smaller arm), share (the systematic part of the mean
        squared distance between a Flash and a Baseline twin), p (share of the labellings whose effect is at least as
        large), detectable (the share that would have had p = 0.05). Steps at which all runs are equal are left out.
    """
    rows = []
    for keys, part in table.groupby(["run", "precision", "seed", "space", "step"], observed=True):
        gram, flash = gram_matrix(part)
        own = np.diag(gram)
        distance = (own[flash][:, None] + own[~flash][None] - 2 * gram[np.ix_(flash, ~flash)]).mean()
        if distance <= 0:
            continue
        chosen = np.array(list(itertools.combinations(range(len(flash)), int(flash.sum()))))
        labellings = np.zeros((len(chosen), len(flash)), dtype=bool)
        np.put_along_axis(labellings, chosen, True, axis=1)
        effect, null = mean_effect(gram, flash[None])[0], mean_effect(gram, labellings)
        # Equal up to rounding counts as "at least as large": the true labelling is one of them.
        p = float((null >= effect - 1e-9 * distance).mean())
        row = dict(zip(("run", "precision", "seed", "space", "step"), keys))
        row |= {"twins": int(min(flash.sum(), (~flash).sum())), "share": effect / distance, "p": p}
        rows.append(row | {"detectable": float(np.quantile(null, 0.95)) / distance})
    return pd.DataFrame(rows)
