"""The verdicts on the question whether it matters for the trained model which attention it was trained with.

Three things are asked for: the loss at the end, its jumps on the way, and a barrier between the weights. Each has a
verdict of its own. Not to see a difference is no proof that there is none: what the seeds leave open is undecided.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from scipy import stats

from fa_study.experiments.amplification import FLASH
from fa_study.experiments.jumps import FACTOR, LEVEL, POOLED, jump_tests
from fa_study.experiments.matter import (
    BARRIER,
    FRESH,
    MARGIN,
    OTHER,
    barriers,
    flash_losses,
    last_losses,
    loss_ratios,
    one_arm,
)
from fa_study.verdicts.microbenchmark import answer
from fa_study.verdicts.verdict import Holds, Verdict, precision_name

_FINDINGS = {"differs": True, "equal": False, "undecided": None}


def combined(findings: Sequence[bool | None]) -> Holds:
    """The answer to a claim from what each setting says: true, false, or None for undecided.

    What is undecided is no evidence, neither for the claim nor against it: one true setting is enough for "holds only
    where", and it takes all settings for "holds" and for "does not hold".

    Raises
    ------
    ValueError : no setting.
    """
    if not findings:
        raise ValueError("a verdict needs at least one setting, got an empty table")
    if True in findings:
        return "holds" if all(findings) else "holds only where"
    return "undecided" if None in findings else "does not hold"


def _name(precision: str) -> str:
    return "both precisions together" if precision == POOLED else precision_name(precision)


def _found(row: pd.Series) -> str:
    """A finding in words."""
    if row["finding"] == "equal":
        beyond = row["low"] > 1 or row["high"] < 1
        return f"equal within {MARGIN:.0%}" + (", though the interval leaves 1 out" if beyond else "")
    return "different" if row["finding"] == "differs" else "undecided"


def _ratio(row: pd.Series) -> str:
    return f"{row['centre']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def loss_verdict(losses: pd.DataFrame) -> Verdict:
    """Is the held-out loss another one if the model was trained with Flash?

    Asked in each precision of the 95 % interval over seeds of the ratio of losses: equal if it lies within `MARGIN` of
    1 as a whole, else different if it leaves 1 out, else undecided. Where seeds were trained to check what the first
    ones had shown, those fresh seeds decide.

    Parameters
    ----------
    losses : the study's table.

    Raises
    ------
    ValueError : no precision has Flash and Baseline runs of two seeds.
    """
    table = flash_losses(losses)
    decisive = table[table["primary"]]
    words = []
    for _, row in decisive.iterrows():
        parts = table[table["precision"].eq(row["precision"]) & table["average"].eq("mean")].set_index("which")
        fresh = row["which"] == "fresh"
        text = (
            f"{_name(row['precision'])}: {_found(row)}, {_ratio(row)} over {row['seeds']} "
            + (f"fresh seeds (from seed {FRESH} on)" if fresh else "seeds, none of them fresh")
            + f"; they would tell {row['detectable']:.3f} from 1 in 4 cases of 5."
        )
        if fresh and "first" in parts.index:
            first, both = parts.loc["first"], parts.loc["all"]
            text += (
                f" They were trained because of the {first['seeds']} seeds before: {_ratio(first)}, p = "
                f"{first['t']:.3g}, {_found(first)}. All {both['seeds']} together: {_ratio(both)}, {_found(both)}."
            )
        words.append(text)
    others = loss_ratios(losses).query("kind == @OTHER")
    spread = ", ".join(f"{row.spread:.1%} in {_name(row.precision)}" for row in others.itertuples())
    text = f"Held-out loss of Flash over that of Baseline, with the 95 % interval over seeds. {' '.join(words)}"
    if spread:
        text += f" Two initialisations differ by {spread} (standard deviation)."
    findings = [_FINDINGS[finding] for finding in decisive["finding"]]
    return Verdict("'the loss is another one with Flash'", combined(findings), text)


def jumps_verdict(losses: pd.DataFrame, factor: float = FACTOR) -> Verdict:
    """Does the loss jump more often with Flash than with Baseline?

    It does in a precision if Flash's runs have more jumps and the exact test over the seeds has p below `LEVEL`, and it
    does not if they have fewer and p is as small; else it is undecided. The question came up with the first seeds of
    FP32. The FP32 seeds from `FRESH` on were trained to answer it: where there are two of them, they alone decide.

    Parameters
    ----------
    losses : the study's table. factor : see `experiments.jumps.jump_tests`.
    """

    def told(row) -> str:
        bound = f"; so few jumps cannot give less than {row.least:.3g}" if row.least >= LEVEL else ""
        seen = f"{row.detectable:.2f} more per run would" if row.detectable < float("inf") else "no excess would"
        return (
            f"{_name(row.precision)} {row.ours} and {row.theirs} in {row.runs} runs each (p = {row.p:.3g}{bound}; "
            f"{seen} have been found in 4 cases of 5)"
        )

    tests = jump_tests(losses, factor)
    flash, twins = tests[tests["kind"] == FLASH], tests[tests["kind"] != FLASH]
    text = f"Jumps with Flash and with Baseline: {', '.join(map(told, flash.itertuples()))}."
    later = losses[losses["precision"].eq("fp32") & (losses["seed"] >= FRESH)]
    fresh = jump_tests(later, factor).query("kind == @FLASH") if len(later) else tests.head(0)
    if len(fresh):
        asked = f"In the seeds from {FRESH} on, which were trained to answer this, {told(next(fresh.itertuples()))}."
        text = f"{asked} {text.replace('Jumps with', 'Over all seeds, with', 1)}"
    if len(twins):
        chance = ", ".join(f"{_name(r.precision)} {r.ours} and {r.theirs} (p = {r.p:.3g})" for r in twins.itertuples())
        text += f" By chance alone, with Baseline nudged and with Baseline: {chance}."
    alone = fresh if len(fresh) else flash[flash["precision"] != POOLED]
    findings = [bool(row.ours > row.theirs) if row.p < LEVEL else None for row in alone.itertuples()]
    return Verdict("'the loss jumps more often with Flash'", combined(findings), text)


def barrier_verdict(lines: pd.DataFrame, losses: pd.DataFrame) -> Verdict:
    """Does a barrier of the loss lie between the weights of Flash and of Baseline?

    It does between two runs if the loss on the straight line between them rises by `BARRIER` or more. How often it may
    still be so, for as many seeds as were measured, is the upper end of the one-sided 95 % interval of Clopper and
    Pearson.

    Parameters
    ----------
    lines, losses : the study's tables; the losses say of how many seeds there are runs.

    Raises
    ------
    ValueError : no line lies between Flash and Baseline.
    """
    rises = barriers(lines)
    between, apart = rises[rises["kind"] == FLASH], rises[rises["kind"] == OTHER]
    trained = last_losses(losses)
    words = []
    for precision, part in between.groupby("precision", observed=True):
        blocked, count = int((~part["connected"]).sum()), len(part)
        most = stats.beta.ppf(0.95, blocked + 1, count - blocked) if blocked < count else 1.0
        seeds = f"{part['seed'].nunique()} of {len(one_arm(trained, 'flash', 0, precision))} seeds"
        words.append(
            f"{blocked} of {count} pairs in {_name(precision)} (lines of {seeds} were measured; a barrier in up to "
            f"{most:.0%} of such pairs remains possible)"
        )
    holds = answer(int((~between["connected"]).sum()), len(between))
    text = (
        f"On the straight line from Flash's weights to Baseline's the loss rises by at most "
        f"{between['barrier'].max():.1%}: a barrier ({BARRIER:.0%} or more) in {', '.join(words)}"
    )
    if len(apart):
        text += (
            f"; between two initialisations in {(~apart['connected']).sum()} of {len(apart)}, by "
            f"{apart['barrier'].min():.0%} to {apart['barrier'].max():.0%}"
        )
    return Verdict("'a barrier of the loss lies between Flash and Baseline'", holds, text + ".")
