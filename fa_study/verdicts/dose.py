"""The verdicts on what the size and the bias of attention's error do to training."""

from __future__ import annotations

import pandas as pd

from fa_study.experiments.dose import STEPS
from fa_study.experiments.law import MODES
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Verdict

_SPACES = ("weights", "predictions")


def size_verdict(tests: pd.DataFrame, response: pd.DataFrame) -> Verdict:
    """Does the size of attention's forward error predict how far training drifts?

    It does in a space and at a step if drift rises with dose (`experiments.dose.rank_test`).

    Parameters
    ----------
    tests : `experiments.dose.rank_test`. response : `experiments.dose.dose_response`.
    """
    tests = tests[tests["step"].isin(STEPS)]
    weights = tests[tests["space"] == "weights"]
    powers = ", ".join(
        f"{row.exponent:.2f} at step {row.step} (τ = {row.tau:.2f}, p = {row.p:.1g})" for row in weights.itertuples()
    )
    known = response.groupby("step")["factor"].any()
    exceeds = {
        row.step: f"from an error of {row.exceeds:.1e} on" if row.exceeds > 0 else "nowhere"
        for row in weights.itertuples()
        if known[row.step]
    }
    beyond = "; ".join(
        f"{words} at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
        for words in dict.fromkeys(exceeds.values())
        if (steps := [step for step, other in exceeds.items() if other == words])
    )
    given, seeds = response["dose"], response["seed"].nunique()
    text = (
        f"{response['variant'].nunique()} arms give attention an RMS error of {given.min():.0e} to {given.max():.0e} "
        f"({seeds} seed{'s' * (seeds > 1)}). Drift of the weights over that of ulp twins grows like the error to the "
        f"power {powers}. It lies beyond the twins {beyond or 'at an unknown error, as is their spread'}."
    )
    return Verdict("'the size of the error predicts the drift'", answer(int(tests["rises"].sum()), len(tests)), text)


def bias_verdict(beside: pd.DataFrame) -> Verdict:
    """Does an error that leans to one side move training further than an error of the same size that does not?

    Asked of rounding toward zero, whose error shrinks the output. It does in an arm, space, step and seed if it drifts
    further than rounding to nearest at the same forward error by more than the factor within which ulp twins lie.

    Parameters
    ----------
    beside : `experiments.dose.beside_nearest`.

    Raises
    ------
    ValueError : no arm that rounds toward zero has the error of two arms to nearest around it.
    """
    beside = beside[beside["step"].isin(STEPS) & beside["factor"].notna()]
    leaning = beside[beside["rounding"] == "toward_zero"]
    further = leaning["excess"] > leaning["factor"]
    words = []
    for rounding in ("toward_zero", "stochastic"):
        part = beside[(beside["rounding"] == rounding) & (beside["space"] == "weights")]
        medians = part.groupby("step")["excess"].median()
        if len(medians):
            steps = ", ".join(f"{value:.2g} at step {step}" for step, value in medians.items())
            words.append(f"{MODES[rounding]} {steps} (widths: {part['variant'].nunique()})")
    text = (
        "Drift of the weights over that of rounding to nearest with the same RMS error: "
        f"{'; '.join(words)}. Further than one more twin would lie in {int(further.sum())} of {len(leaning)} cases."
    )
    return Verdict("'bias drives the drift'", answer(int(further.sum()), len(leaning)), text)


def direction_verdict(effects: pd.DataFrame, *, level: float = 0.01) -> Verdict:
    """Does an error that is injected into attention lead training to somewhere of its own?

    It does in an arm, space and step if what its twins have in common has p below `level`. Flash is told beside them.

    Parameters
    ----------
    effects : `experiments.directions.effects_of_doses`.

    Raises
    ------
    ValueError : no tiled arm has twins.
    """
    effects = effects[effects["step"] > 0]
    own, both = effects[effects["a"] == effects["b"]], effects[effects["a"] != effects["b"]]
    tiled = own[own["rounding"] != "Flash"]
    if tiled.empty:
        raise ValueError("no run whose attention is tiled has twins; train some with twin=1, 2, ...")

    def told(part: pd.DataFrame) -> str:
        weights = part[part["space"] == "weights"].groupby("step")["share"].agg(["min", "max"])
        spans = (
            f"{row['min']:.0%}" + (f" to {row['max']:.0%}" if len(part["a"].unique()) > 1 else "") + f" at step {step}"
            for step, row in weights.iterrows()
        )
        return f"in {int((part['p'] < level).sum())} of {len(part)} cases (weights: {', '.join(spans)})"

    names = {"Flash": "Flash", **MODES}
    each = "; ".join(
        f"{names[rounding]} {told(own[own['rounding'] == rounding])}"
        for rounding in names
        if rounding in set(own["rounding"])
    )
    of = own.set_index("a")["rounding"].to_dict()
    pairs = both.assign(pair=[tuple(sorted((of[row.a], of[row.b]))) for row in both.itertuples()])
    widths = {
        "both widths toward zero": ("toward_zero", "toward_zero"),
        "two widths to nearest": ("nearest_even", "nearest_even"),
        "to nearest and toward zero": ("nearest_even", "toward_zero"),
    }
    shared = "; ".join(
        f"{words} {told(part)}" for words, pair in widths.items() if len(part := pairs[pairs["pair"] == pair])
    )
    text = (
        f"Share of the squared distance from Baseline that all {tiled['twins'].max()} twins of an arm have in common, "
        f"and how often it has p < {level:g}: {each}." + (f" That two arms have in common: {shared}." if shared else "")
    )
    return Verdict(
        "'an injected error leads somewhere of its own'", answer(int((tiled["p"] < level).sum()), len(tiled)), text
    )
