"""The verdicts on what the Wasserstein distance of weights can tell."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.permutations import kept_in_training
from fa_study.experiments.weights import whole_model
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Verdict, precision_name


def blind_verdict(table: pd.DataFrame, *, least: float = 0.5) -> Verdict:
    """Does W1 show how far apart two initialisations are?

    It does at a snapshot of two runs if it is at least `least` times their mean |difference|. Precisions share their
    initial weights, and weights that are the same count once.
    """
    everything = kept_in_training(whole_model(table, "other initialisation"))
    pairs = everything.drop_duplicates(["seed", "step", "wasserstein", "mean_difference", "relative_l2"])
    first, last = (pairs[pairs["step"] == step] for step in (pairs["step"].min(), pairs["step"].max()))
    chance = pairs["wasserstein"] / pairs["wasserstein_floor"]
    start = chance[first.index]
    grown = []
    for precision, part in everything.groupby("precision"):
        ends = part[part["step"].isin([part["step"].min(), part["step"].max()])]
        medians = ends.groupby("step")[["relative_l2", "wasserstein"]].median()
        growth = medians.iloc[-1] / medians.iloc[0] - 1
        count = part["run"].nunique()
        grown.append(
            f"{growth['relative_l2']:+.1%} and {growth['wasserstein']:+.0%} in {precision_name(precision)} "
            f"({count} pair{'s' * (count > 1)} of runs)"
        )
    repeated = len(first) < (everything["step"] == first["step"].max()).sum()
    shared = "; the precisions start from the same" if repeated else ""
    text = (
        f"At step {first['step'].max()} W1 is {start.min():.2f} to {start.max():.2f} times what chance gives two "
        f"samples of one distribution ({len(first)} pairs of initial weights{shared}), and at most "
        f"{chance.drop(first.index).max():.1f} times later; it never exceeds {pairs['kept'].max():.1%} of mean "
        f"|difference|. In relative L2 two initialisations are {first['relative_l2'].median():.2f} apart from the "
        f"start, where independent values of mean zero have √2 = {2**0.5:.2f}. By step {last['step'].max():,} relative "
        f"L2 and W1 have changed by {', '.join(grown)} (medians)."
    )
    holds = answer(int((pairs["kept"] >= least).sum()), len(pairs))
    return Verdict("'W1 shows how far apart two initialisations are'", holds, text)


def linearity_verdict(noise: pd.DataFrame, table: pd.DataFrame, *, least: float = 0.5) -> Verdict:
    """Does W1 grow in proportion to how far the weights moved?

    It does at a snapshot of Flash and Baseline if W1 is at least `least` times mean |difference|; as long as no value
    passes another the two are equal.

    Parameters
    ----------
    noise : `experiments.permutations.perturbed`, of one n. table : the weights' table.
    """
    kept = noise.groupby("size")["kept"].mean()
    sizes = (1e-4, 1e-2, 1e-1)
    model = kept_in_training(whole_model(table, "Flash against Baseline"))
    words = []
    for precision, part in model.groupby("precision"):
        medians, count = part.groupby("step")["kept"].median(), part["seed"].nunique()
        words.append(
            f"{medians.iloc[0]:.2f} at step {medians.index[0]} and {medians.iloc[-1]:.3f} at step "
            f"{medians.index[-1]:,} in {precision_name(precision)} ({count} seed{'s' * (count > 1)})"
        )
    text = (
        f"Noise of {', '.join(f'{size:g}' for size in sizes)} times the values' own size moves "
        f"{noise['n'].iloc[0]:,} normal values by a W1 of {', '.join(f'{kept[size]:.2f}' for size in sizes)} times "
        f"mean |difference|. Between Flash and Baseline in training that is {'; '.join(words)}."
    )
    return Verdict("'W1 is proportional to the drift'", answer(int((model["kept"] >= least).sum()), len(model)), text)
